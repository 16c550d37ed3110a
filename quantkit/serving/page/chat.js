"use strict";
// A conversation with one model: what was written, what is being answered, and where it is kept.

class Chat {
  constructor(history, parameters, server) {
    this.history = history;
    this.parameters = parameters;
    this.server = server;  // knows the chosen model
    this.record = newChat();
    this.running = null;
    this.labels = new Map();  // first words of a prompt by the id of its answer
    this.pinned = true;
    this.top = 0;
    at("scroll").addEventListener("scroll", () => {
      const { scrollHeight, scrollTop, clientHeight } = at("scroll");
      if (scrollHeight - scrollTop - clientHeight < 60) this.pinned = true;
      else if (scrollTop < this.top) this.pinned = false;
      this.top = scrollTop;
    });
    new ResizeObserver(() => this.follow()).observe(at("scroll"));
    history.replaced = (id) => { if (id === this.record.id) this.refresh(); };
    window.addEventListener("pagehide", () => this.stop());  // what was written is kept as it stops
  }

  // The end stays in view, unless the reader has scrolled away from it.
  follow() { if (this.pinned) at("scroll").scrollTop = at("scroll").scrollHeight; }

  stop() { this.running?.abort(); }

  fresh() {
    this.stop();
    this.show(newChat());
    at("input").focus();
  }

  open(id) {
    if (id === this.record.id) return;  // what is being answered goes on
    const record = this.history.get(id);
    if (!record) return notify(GONE);
    this.stop();
    if (record.model) this.server.choose(record.model);
    this.show(record);
  }

  // Shows what another tab made of the chat, unless something is being written here.
  refresh() {
    const record = this.history.get(this.record.id);
    if (record && !this.running && !at("thread").querySelector("textarea")) this.show(record);
  }

  show(record) {
    this.record = record;
    const views = record.turns.map((turn, index) => (
      turn.role === "user" ? this.userTurn(turn.content, index) : AssistantTurn.of(turn, this.actions())));
    at("thread").replaceChildren(at("empty"));
    for (const { node } of views) at("thread").append(node);
    this.pinned = true;
    this.changed();
    requestAnimationFrame(() => this.follow());
  }

  changed() {
    const { id, turns } = this.record;
    at("empty").hidden = turns.length > 0;
    // a reload opens the chat again
    window.history.replaceState(null, "", turns.length ? "#" + id : location.pathname + location.search);
    this.history.changed();
  }

  keep() {
    this.record.updated = Date.now();
    this.record.model = this.server.model?.id;
    this.history.put(this.record);
  }

  actions() { return { regenerate: () => this.regenerate(), resume: () => this.resume() }; }

  userTurn(text, index) { return new UserTurn(text, (changed) => this.edit(index, changed)); }

  // The parameters of a request, or null: it can't be sent now.
  async allowed() {
    const { record } = this;
    if (!this.running && !await this.server.ready()) return null;
    if (this.running) notify("Nothing was sent: an answer is still being written.");
    return this.running || record !== this.record ? null : this.parameters.values();
  }

  // Whether the message was sent.
  async send(text) {
    const values = await this.allowed();
    if (values) this.ask(text, values);
    return values !== null;
  }

  // Sends a changed message in place of a turn and what came after it, or leaves all as it is.
  async edit(index, text) {
    const values = await this.allowed();
    if (!values) return;
    this.cut(index);
    this.ask(text, values);
    at("input").focus();
  }

  ask(text, values) {
    const { record } = this;
    if (!record.turns.length) record.title ||= titleOf(text);
    const turn = this.userTurn(text, record.turns.length);
    record.turns.push({ role: "user", content: text });
    at("thread").append(turn.node);
    this.answer(values);
  }

  // Drops a turn and what came after it.
  cut(index) {
    this.record.turns.length = index;
    for (const node of [...at("thread").querySelectorAll(".turn")].slice(index)) node.remove();
  }

  async regenerate() {
    const values = await this.allowed();
    if (!values) return;
    at("input").focus();
    this.cut(this.record.turns.length - 1);
    this.answer(values);
  }

  // More of an answer that was cut: its text is what the model's answer begins with.
  async resume() {
    const values = await this.allowed();
    if (!values) return;
    at("input").focus();
    const turn = this.record.turns.at(-1), view = new AssistantTurn(this.actions());
    at("thread").lastElementChild.replaceWith(view.node);
    if (turn.reasoning) view.think(turn.reasoning);
    view.write(turn.content);
    this.run(turn, view, (signal) => this.continuation(values, turn.content, signal));
  }

  answer(values) {
    const model = this.server.model.id, view = new AssistantTurn(this.actions());
    const turn = { role: "assistant", model, content: "", reasoning: "", calls: [], figures: "" };
    const request = this.request(values);
    this.record.turns.push(turn);
    at("thread").append(view.node);
    this.run(turn, view, () => request);
  }

  // Messages for the model. What was never answered is left out, so that turns alternate.
  messages() {
    const { turns } = this.record, { system } = this.parameters, messages = [];
    if (system) messages.push({ role: "system", content: system });
    turns.forEach((turn, index) => {
      const reply = turns[index + 1];
      if (turn.role === "user" && reply && !reply.content) return;
      if (turn.role === "user" || turn.content) messages.push({ role: turn.role, content: turn.content });
    });
    return messages;
  }

  request(values) {
    const { model } = this.server, asked = { model: model.id, ...values };
    if (model.chat) return ["v1/chat/completions", { ...asked, messages: this.messages() }];
    return ["v1/completions", { ...asked, prompt: this.record.turns.map((turn) => turn.content).join("") }];
  }

  async continuation(values, text, signal) {
    const { model } = this.server;
    if (!model.chat) return this.request(values);
    const tokens = async (body) => (
      (await (await post("tokenize", { model: model.id, ...body }, signal)).json()).tokens);
    const asked = await tokens({ messages: this.messages().slice(0, -1) });
    const begun = await tokens({ prompt: text, add_special_tokens: false });
    return ["v1/completions", { model: model.id, ...values, prompt: [...asked, ...begun] }];
  }

  async run(turn, view, request) {
    const { record } = this, stop = this.running = new AbortController(), meter = new Meter();
    turn.ended = turn.error = "";
    view.writing = true;
    this.pinned = true;
    this.follow();
    this.changed();
    this.keep();
    this.busy(true);
    try {
      const [path, body] = await request(stop.signal);
      for await (const event of stream(path, body, stop.signal)) {
        turn.request = event.id;
        this.labels.set(event.id, titleOf(record.turns.findLast(({ role }) => role === "user").content));
        meter.count(event);
        for (const choice of event.choices) this.take(choice, turn, view);
        view.speed.textContent = meter.rate;
      }
    } catch (error) {
      turn.ended = stop.signal.aborted ? "stopped" : "error";
      if (!stop.signal.aborted) turn.error = error.message;
    }
    turn.figures = meter.first || turn.ended === "stopped" ? meter.text(turn.ended) : "";
    view.finish(turn);
    if (this.running === stop) this.running = null;
    if (!this.running) this.busy(false);
    if (record === this.record) {
      this.keep();
      this.follow();
    } else if (this.history.get(record.id)) this.history.put(record);
  }

  take({ delta, text, finish_reason: ended }, turn, view) {
    const piece = (delta ? delta.content : text) || "", thought = delta?.reasoning_content || "";
    if (ended) turn.ended = ended;
    if (thought) {
      turn.reasoning += thought;
      view.think(thought, () => this.follow());
    }
    if (piece) {
      turn.content += piece;
      view.write(piece, () => this.follow());
    }
    for (const call of delta?.tool_calls ?? []) {
      const known = turn.calls[call.index] ??= { name: "", arguments: "" };
      known.name += call.function.name ?? "";
      known.arguments += call.function.arguments;
      view.showCalls(turn.calls);
    }
  }

  busy(on) {
    at("thread").classList.toggle("busy", on);
    at("thread").setAttribute("aria-busy", String(on));
    showStop(on);
  }
}

// The composer's button sends, or stops what is being answered.
function showStop(on) {
  at("send").textContent = on ? "Stop" : "Send";
  at("send").classList.toggle("stop", on);
}
