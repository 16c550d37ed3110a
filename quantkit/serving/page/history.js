"use strict";
// Chats in this browser's storage, each under a key of its own, so that two tabs don't overwrite each other.

const MAX_CHATS = 200;
const GONE = "That chat isn't in this browser any more.";

// JSON by name. What a browser refuses to keep is kept until the page closes.
class Store {
  constructor() {
    this.prefix = "quantkit " + base + " ";  // servers behind one proxy share an origin
    this.memory = new Map();
    try {
      this.storage = window.localStorage;
    } catch { this.storage = null; }
    this.lasting = this.storage !== null;
  }

  read(name) {
    if (this.memory.has(name)) return this.memory.get(name);
    try {
      return JSON.parse(this.storage?.getItem(this.prefix + name) ?? "null");
    } catch { return null; }
  }

  // Whether it is kept.
  write(name, value) {
    try {
      if (!this.storage) throw new DOMException("no storage", "QuotaExceededError");
      this.storage.setItem(this.prefix + name, JSON.stringify(value));
      this.memory.delete(name);
      return true;
    } catch {
      this.memory.set(name, value);
      return false;
    }
  }

  remove(name) {
    this.memory.delete(name);
    this.storage?.removeItem(this.prefix + name);
  }

  // Removes what is stored and gives its text, for `restore`.
  take(name) {
    const text = this.storage.getItem(this.prefix + name);
    this.storage.removeItem(this.prefix + name);
    return text;
  }

  restore(name, text) {
    try {
      this.storage.setItem(this.prefix + name, text);
    } catch { this.memory.set(name, JSON.parse(text)); }  // another tab was faster
  }

  names() {
    const stored = Object.keys(this.storage ?? {}).filter((key) => key.startsWith(this.prefix));
    return new Set([...stored.map((key) => key.slice(this.prefix.length)), ...this.memory.keys()]);
  }
}

class ChatHistory {
  constructor(store) {
    this.store = store;
    this.changed = () => {};  // called when the list is another one
    this.replaced = () => {};  // called with the id of a chat that another tab wrote
    window.addEventListener("storage", ({ key }) => {
      this.changed();
      const prefix = store.prefix + "chat ";
      if (key?.startsWith(prefix)) this.replaced(key.slice(prefix.length));
    });
  }

  // Newest first; what isn't a chat is left out.
  list() {
    const names = [...this.store.names()].filter((name) => name.startsWith("chat "));
    return names.map((name) => this.get(name.slice("chat ".length))).filter(Boolean)
      .sort((first, second) => second.updated - first.updated);
  }

  // A chat by its id, or null.
  get(id) {
    const chat = this.store.read("chat " + id);
    return chat?.id === id && Array.isArray(chat.turns) && chat.turns.every(isTurn) ? chat : null;
  }

  remove(id) {
    this.store.remove("chat " + id);
    this.changed();
  }

  // Keeps a chat. Where there is no room the oldest others go, unless that isn't enough. The user is told.
  put(chat) {
    const others = this.list().filter((other) => other.id !== chat.id).map(({ id }) => "chat " + id);
    const surplus = others.splice(MAX_CHATS - 1);
    const kept = this.store.write("chat " + chat.id, chat);
    const dropped = kept ? surplus.length : this.makeRoom(chat, [...others, ...surplus]);
    if (kept) for (const name of surplus) this.store.remove(name);
    if (!kept && !dropped) {
      notify("This browser has no room for the chat: what is new in it is lost when the page closes. "
        + "No other chat was dropped.");
    } else if (dropped) {
      notify(`This browser's room for chats is used up: the oldest were dropped (${dropped}).`);
    }
    this.changed();
  }

  // Drops the last of the named chats until this one is kept. Returns how many; none if all are too few.
  makeRoom(chat, names) {
    const taken = [];
    for (const name of names.filter((other) => !this.store.memory.has(other)).reverse()) {
      taken.push([name, this.store.take(name)]);
      if (this.store.write("chat " + chat.id, chat)) return taken.length;
    }
    for (const [name, text] of taken) this.store.restore(name, text);
    return 0;
  }
}

// Whether a stored value can be shown as a turn.
function isTurn(turn) {
  return ["user", "assistant"].includes(turn?.role) && typeof turn.content === "string"
    && (turn.calls === undefined || (Array.isArray(turn.calls) && turn.calls.every(Boolean)));
}

function newChat() {
  const id = Date.now().toString(36) + Math.random().toString(36).slice(2, 8);
  return { id, title: "", updated: Date.now(), turns: [] };
}

function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > 60 ? line.slice(0, 59) + "…" : line;
}

function chatMarkdown(chat) {
  const turns = chat.turns.map((turn) => {
    const name = turn.role === "user" ? "You" : turn.model || chat.model || "Assistant";
    return `## ${name}\n\n${turn.content}`;
  });
  return [`# ${chat.title}`, ...turns].join("\n\n") + "\n";
}
