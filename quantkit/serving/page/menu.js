"use strict";
// A menu under a button, by keyboard as the ARIA practices have it: arrows, Home, End, Escape, first letters.

function menuButton(text, label, action) {
  const node = button(text, "small more", action);
  node.setAttribute("aria-label", label);
  node.setAttribute("aria-haspopup", "menu");
  node.title = label;
  expand(node, false);
  return node;
}

class Menu {
  // `node`: a popover with the role of a menu.
  constructor(node) {
    this.node = node;
    this.anchor = null;
    node.addEventListener("keydown", (event) => this.key(event));
    node.addEventListener("toggle", ({ newState }) => {
      if (this.anchor) expand(this.anchor, newState === "open");
    });
    window.addEventListener("resize", () => this.close());
  }

  get shown() { return this.node.matches(":popover-open"); }

  // Shows what can be done: functions by their names.
  open(anchor, actions) {
    if (anchor.getAttribute("aria-expanded") === "true") return;  // the press on the button has closed it
    this.anchor = anchor;
    this.node.setAttribute("aria-label", anchor.getAttribute("aria-label"));
    this.node.replaceChildren(...Object.entries(actions).map(([name, perform]) => {
      const item = button(name, "", () => { this.close(); perform(); });
      item.setAttribute("role", "menuitem");
      item.tabIndex = -1;
      return item;
    }));
    this.node.showPopover();
    const { left, right, top, bottom } = anchor.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.node;
    this.node.style.left = Math.max(8, Math.min(right - width, window.innerWidth - width - 8)) + "px";
    this.node.style.top = (bottom + height + 12 > window.innerHeight ? top - height - 4 : bottom + 4) + "px";
    this.node.firstElementChild.focus();
  }

  // The focus goes back to the button.
  close() {
    if (!this.shown) return;
    this.node.hidePopover();
    this.anchor.focus();
  }

  key(event) {
    const items = [...this.node.children], at = items.indexOf(document.activeElement);
    const letter = event.key.length === 1 ? event.key.toLowerCase() : "";
    const named = [...items.slice(at + 1), ...items].find((item) => (
      letter.trim() && item.textContent.toLowerCase().startsWith(letter)));
    const next = { ArrowDown: items[at + 1] ?? items[0], ArrowUp: items.at(at - 1), Home: items[0],
      End: items.at(-1) }[event.key] ?? named;
    event.stopPropagation();  // Escape closes nothing else
    if (event.key === "Escape" || event.key === "Tab") this.close();
    if (event.key === "Escape" || next) event.preventDefault();
    next?.focus();
  }
}
