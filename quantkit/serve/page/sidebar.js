"use strict";
// The list of chats: a column on wide screens, a drawer on narrow ones.

class Sidebar {
  constructor(store, history, chat, open) {
    this.store = store;
    this.history = history;
    this.chat = chat;
    this.open = open;  // shows a chat by its id
    this.narrow = window.matchMedia("(max-width: 60rem)");
    history.changed = () => this.draw();
    at("chats-toggle").addEventListener("click", () => this.show(at("chats").hidden));
    at("backdrop").addEventListener("click", () => this.show(false));
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
    const chats = this.history.list();
    at("chat-list").replaceChildren(...chats.map((chat) => this.item(chat)));
    if (!chats.length) at("chat-list").append(element("li", "note", "None yet."));
    if (this.store.lasting) return;
    at("chats-note").textContent = "This browser keeps nothing: chats are lost when the page closes.";
  }

  item(chat) {
    const current = chat.id === this.chat.record.id;
    const open = button(chat.title || "Untitled", "title", () => {
      this.open(chat.id);
      if (this.narrow.matches) this.show(false);
    });
    if (current) open.setAttribute("aria-current", "true");
    const rename = button("Rename", "small", () => this.rename(chat, item, open));
    const json = button("JSON", "small", () => (
      download("chat.json", "application/json", JSON.stringify(this.history.get(chat.id), null, 2))));
    const text = button("Markdown", "small", () => (
      download("chat.md", "text/markdown", chatMarkdown(this.history.get(chat.id)))));
    json.title = "Save as JSON";
    text.title = "Save as Markdown";
    const remove = button("Delete", "small", () => this.remove(chat));
    for (const action of [rename, json, text, remove]) {
      action.setAttribute("aria-label", `${action.title || action.textContent}: ${chat.title}`);
    }
    const item = element("li", "", open, element("div", "chat-actions", rename, text, json, remove));
    return item;
  }

  rename(chat, item, open) {
    const input = element("input");
    input.value = chat.title;
    input.maxLength = 200;
    input.setAttribute("aria-label", "Title of the chat");
    let done = false;
    const end = (keep) => {
      if (done) return;
      done = true;
      const title = input.value.trim();
      if (!keep || !title) return this.draw();
      if (chat.id === this.chat.record.id) this.chat.record.title = title;
      this.history.put({ ...this.history.get(chat.id), title });
    };
    input.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (composing(event)) return;
      if (event.key === "Enter") end(true);
      if (event.key === "Escape") end(false);
    });
    input.addEventListener("blur", () => end(true));
    open.replaceWith(input);
    input.select();
  }

  remove(chat) {
    const record = this.history.get(chat.id);
    if (chat.id === this.chat.record.id) this.chat.fresh();
    this.history.remove(chat.id);
    notify("The chat was deleted.", "Undo", () => this.history.put(record));
  }
}
