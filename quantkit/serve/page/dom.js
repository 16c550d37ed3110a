"use strict";
// What every other script uses: elements, formats, notices. Scripts share one scope, in index.html's order.

// not relative addresses: fetch refuses those on a page whose own address holds a password
const base = location.origin + location.pathname.replace(/[^/]*$/, "");

const at = (id) => document.getElementById(id);

// An element whose text is text: nothing on this page is ever made of a string of markup. Lists of parts stay
// lists, as a call takes only so many arguments.
function element(tag, kind, ...content) {
  const node = document.createElement(tag);
  if (kind) node.className = kind;
  for (const part of content.flat()) if (part !== undefined && part !== null) node.append(part);
  return node;
}

function svg(tag, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

function button(text, kind, action) {
  const node = element("button", kind, text);
  node.type = "button";
  node.addEventListener("click", action);
  return node;
}

// A button that copies what `text()` gives when it is pressed.
function copier(text) {
  const node = button("Copy", "small", async () => {
    try {
      await navigator.clipboard.writeText(text());
      node.textContent = "Copied";
    } catch { node.textContent = "Not allowed here"; }
    setTimeout(() => { node.textContent = "Copy"; }, 1500);
  });
  return node;
}

// Tells what happened, with a way to take it back.
function notify(text, action, perform) {
  const message = element("div", "message", element("span", "", text));
  const close = () => message.remove();
  if (action) message.append(button(action, "small", () => { close(); perform(); }));
  message.append(button("Close", "small", close));
  at("notice").replaceChildren(message);
  setTimeout(close, 10000);
}

function download(name, type, text) {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// Whether a key belongs to an input method, which is composing a character.
function composing(event) { return event.isComposing || event.keyCode === 229; }

function expand(toggle, open) { toggle.setAttribute("aria-expanded", String(open)); }

function count(number, noun) {
  return number.toLocaleString("en") + " " + noun + (number === 1 ? "" : "s");
}

function seconds(value) {
  if (value < 0.1) return (value * 1000).toFixed(1) + " ms";
  return value.toFixed(value < 10 ? 2 : 1) + " s";
}

function bytes(value) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; Math.abs(value) >= 1024 && unit < units.length - 1; unit++) value /= 1024;
  return (unit ? value.toFixed(1) : value.toFixed(0)) + " " + units[unit];
}
