"use strict";
// Joins the parts: the server's models, the composer, the panels.

// The models of this server, and which is chosen.
class Server {
  constructor(store, described) {
    this.store = store;
    this.described = described;
    this.models = [];
    this.model = null;
    at("models").addEventListener("change", () => this.choose(at("models").value));
  }

  // Whether there is a model to ask.
  async ready() {
    if (!this.model) await this.connect();
    return this.model !== null;
  }

  async connect() {
    try {
      this.models = (await get("v1/models")).data;
    } catch (error) {
      at("about").textContent = "no connection: " + error.message;
      return;
    }
    at("models").replaceChildren(...this.models.map((model) => element("option", "", model.id)));
    at("models").hidden = this.models.length < 2;
    at("name").hidden = this.models.length > 1;
    comparison.describe(this.models);
    this.choose(this.store.read("model") ?? "");
  }

  // A model by its name; one that isn't there leaves the choice as it was.
  choose(id) {
    this.model = this.models.find((model) => model.id === id) ?? this.model ?? this.models[0] ?? null;
    if (!this.model) return;
    const { model } = this, kv = model.kv === "none" ? "" : " · KV " + model.kv;
    this.store.write("model", model.id);
    at("models").value = at("name").textContent = document.title = model.id;
    at("about").textContent = model.method + kv + " · context " + model.max_model_len.toLocaleString("en");
    at("invitation").textContent = model.chat
      ? "The model runs on the machine that serves this page; what you write goes nowhere else."
      : "This model has no chat template: it continues what you write.";
    this.described(model);
  }
}

const store = new Store(), parameters = new Parameters(store);
const server = new Server(store, (model) => parameters.describe(model));
const chatHistory = new ChatHistory(store);
const chat = new Chat(chatHistory, parameters, server);
const sidebar = new Sidebar(store, chatHistory, chat, openChat);
const comparison = new Comparison(parameters, server, chat.labels);
const trace = new Trace(drawLive), panel = new Panel(), timeline = new Timeline(trace, chat.labels);
const input = at("input");

function drawLive(error) {
  const names = [...trace.models.keys()], choice = at("live-model");
  at("live-state").textContent = error ? "no live figures: " + error : "";
  if (names.length !== choice.options.length) {
    choice.replaceChildren(...names.map((name) => element("option", "", name)));
    choice.hidden = names.length < 2;
    if (server.model) choice.value = server.model.id;
  }
  panel.draw(trace.models.get(choice.value));
  timeline.draw();
}

function showLive(open) {
  at("live").hidden = !open;
  expand(at("live-toggle"), open);
  store.write("live", open);
  trace.watch(open);
}

function compare(open) {
  chat.stop();
  comparison.stop();
  comparison.show(open);
}

function openChat(id) {
  if (comparison.open) compare(false);
  chat.open(id);
  input.focus();
}

function grow() {
  input.style.height = "auto";
  input.style.height = input.scrollHeight + "px";
}

at("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const place = comparison.open ? comparison : chat, text = input.value;
  if (place.running) return place.stop();
  if (!text.trim()) return;
  input.value = "";
  grow();
  input.focus();
  if (!await place.send(text) && !input.value) {
    input.value = text;  // nothing was sent
    grow();
  }
});
input.addEventListener("input", grow);
input.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || composing(event)) return;
  event.preventDefault();
  if (!(comparison.open ? comparison : chat).running) at("form").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || composing(event) || at("settings").open) return;
  if (sidebar.drawer) return sidebar.show(false);
  chat.stop();
  comparison.stop();
});
at("pair").addEventListener("submit", (event) => event.preventDefault());
at("settings-toggle").addEventListener("click", () => at("settings").showModal());
at("settings").addEventListener("close", () => at("settings-toggle").focus());
at("fresh").addEventListener("click", () => { compare(false); chat.fresh(); });
at("compare-toggle").addEventListener("click", () => compare(!comparison.open));
at("live-toggle").addEventListener("click", () => showLive(at("live").hidden));
at("live-close").addEventListener("click", () => { showLive(false); at("live-toggle").focus(); });
at("live-model").addEventListener("change", () => drawLive(""));
if (store.read("live") && !window.matchMedia("(max-width: 60rem)").matches) showLive(true);
server.connect().then(() => { if (location.hash.length > 1) chat.open(location.hash.slice(1)); });
