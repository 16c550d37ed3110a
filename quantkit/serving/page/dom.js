"use strict";
// What every other script uses: elements, formats, notices. Scripts share one scope, in index.html's order.

// not relative addresses: fetch refuses those on a page whose own address holds a password
const base = location.origin + location.pathname.replace(/[^/]*$/, "");

const at = (id) => document.getElementById(id);

// An element whose text is text: nothing on this page is ever made of a string of markup. Lists of parts stay
// lists, as the number of a call's arguments is limited.
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

const ICONS = {
  Copy: "M7.500 7.500h9v9h-9zM4 12.500H3.500v-9h9V4",
  Edit: "M4 16l.8-3.600L13.500 3.700l2.800 2.800-8.700 8.700zM11.500 5.700l2.800 2.800",
  Regenerate: "M15.800 8.500A6 6 0 1 0 16 11M16 4.500v4h-4",
  Continue: "M4 5l6 5-6 5zM15 5v10",
};

// A button that shows its name as an icon: the text is for screen readers, and the tooltip for the others.
function iconButton(name, kind, action) {
  const node = button("", "small compact " + kind, action);
  const icon = svg("svg", { viewBox: "0 0 20 20", "aria-hidden": "true" });
  icon.append(svg("path", { d: ICONS[name] }));
  node.append(icon, element("span", "", name));
  node.title = name;
  return node;
}

// A button that copies what `text()` gives when it is pressed, and says whether it did.
function copier(text, node = button("Copy", "small", () => {})) {
  const label = node.querySelector("span") ?? node;
  label.setAttribute("aria-live", "polite");
  node.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
      label.textContent = "Copied";
    } catch { label.textContent = "Not allowed here"; }
    node.classList.add("says");
    setTimeout(() => {
      label.textContent = "Copy";
      node.classList.remove("says");
    }, 1500);
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
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; value >= 999.5 && unit < units.length - 1; unit++) value /= 1000;
  return value.toFixed(unit && value < 9.95 ? 1 : 0) + " " + units[unit];
}
