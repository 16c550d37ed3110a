"use strict";
// The list of chats: a column on wide screens, a drawer on narrow ones.

class Sidebar {
  constructor(store, history, chat, open) {
    this.store = store;
    this.history = history;
    this.chat = chat;
    this.open = open;  // shows a chat by its id
    this.menu = new Menu(at("chat-menu"));
    at("chat-menu").addEventListener("toggle", () => this.draw());
    this.narrow = window.matchMedia("(max-width: 60rem)");
    history.changed = () => this.draw();
    at("chats-toggle").addEventListener("click", () => this.show(at("chats").hidden));
    at("backdrop").addEventListener("click", () => this.show(false));
    at("chats").addEventListener("scroll", () => this.menu.close());
    this.narrow.addEventListener("change", () => this.show(!this.narrow.matches && this.wanted, false));
    this.show(!this.narrow.matches && this.wanted, false);
    this.draw();
  }

  get wanted() { return this.store.read("sidebar") ?? true; }

  get drawer() { return this.narrow.matches && !at("chats").hidden; }

  show(open, asked = true) {
    at("chats").hidden = !open;
    at("backdrop").hidden = !(open && this.narrow.matches);
    expand(at("chats-toggle"), open);
    if (!asked) return;
    if (!this.narrow.matches) this.store.write("sidebar", open);
    else if (open) at("chat-list").querySelector("button")?.focus();
    else at("chats-toggle").focus();
  }

  draw() {
    const list = at("chat-list"), focus = this.focus(list), chats = this.history.list();
    if (list.querySelector("input") || this.menu.shown) return;  // their end draws the list
    list.replaceChildren(...chats.map((chat) => this.item(chat)));
    if (!chats.length) list.append(element("li", "note", "None yet."));
    if (focus) this.restore(list, focus);
    if (this.store.lasting) return;
    at("chats-note").textContent = "This browser keeps nothing: chats are lost when the page closes.";
  }

  // Where the focus is in the list, or null.
  focus(list) {
    const item = document.activeElement.closest("#chat-list > li");
    if (!item) return null;
    return { id: item.dataset.chat, place: [...list.children].indexOf(item),
      button: [...item.querySelectorAll("button")].indexOf(document.activeElement) };
  }

  // The same button of the same chat, or the chat that took its place.
  restore(list, { id, place, button: index }) {
    const items = [...list.children], same = items.find((item) => item.dataset.chat === id);
    const next = items[Math.min(place, items.length - 1)];
    (same?.querySelectorAll("button")[index] ?? next.querySelector("button") ?? at("chats-toggle")).focus();
  }

  // The chat as it is kept now, or null: another tab has deleted it.
  stored(chat) {
    const record = this.history.get(chat.id);
    if (!record) {
      notify(GONE);
      this.draw();
    }
    return record;
  }

  save(chat, name, type, written) {
    const record = this.stored(chat);
    if (record) download(name, type, written(record));
  }

  item(chat) {
    const current = chat.id === this.chat.record.id;
    const open = button(chat.title || "Untitled", "title", () => {
      this.open(chat.id);
      if (this.narrow.matches) this.show(false);
    });
    if (current) open.setAttribute("aria-current", "true");
    const json = (record) => JSON.stringify(record, null, 2);
    const more = menuButton("⋯", `Actions: ${chat.title || "Untitled"}`, () => this.menu.open(more, {
      "Rename": () => this.rename(chat, open),
      "Save as Markdown": () => this.save(chat, "chat.md", "text/markdown", chatMarkdown),
      "Save as JSON": () => this.save(chat, "chat.json", "application/json", json),
      "Delete": () => this.remove(chat),
    }));
    const item = element("li", "", open, more);
    item.dataset.chat = chat.id;
    return item;
  }

  rename(chat, open) {
    const input = element("input");
    input.value = chat.title;
    input.maxLength = 200;
    input.setAttribute("aria-label", "Title of the chat");
    let done = false;
    const end = (keep, focus) => {
      if (done) return;
      done = true;
      input.replaceWith(open);
      if (focus) open.focus();
      const title = input.value.trim(), record = keep && title ? this.stored(chat) : null;
      if (!record) return this.draw();
      if (chat.id === this.chat.record.id) this.chat.record.title = title;
      this.history.put({ ...record, title });
    };
    input.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (composing(event)) return;
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.preventDefault();  // it would press the button that gets the focus
      end(event.key === "Enter", true);
    });
    input.addEventListener("blur", () => end(true, false));
    open.replaceWith(input);
    input.select();
  }

  remove(chat) {
    const record = this.stored(chat);
    if (!record) return;
    if (chat.id === this.chat.record.id) this.chat.fresh();
    this.history.remove(chat.id);
    notify("The chat was deleted.", "Undo", () => this.history.put(record));
  }
}
