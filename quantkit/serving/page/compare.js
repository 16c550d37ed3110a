"use strict";
// One prompt to two models: their answers side by side, and the first token that differs.

const ALTERNATIVES = 5;

class Comparison {
  constructor(parameters, server, labels) {
    this.parameters = parameters;
    this.server = server;
    this.labels = labels;
    this.running = null;
    this.open = false;
  }

  // Two models are needed, and more can be chosen from.
  describe(models) {
    at("compare-toggle").hidden = models.length < 2;
    for (const [id, index] of [["left-model", 0], ["right-model", 1]]) {
      at(id).replaceChildren(...models.map((model) => element("option", "", model.id)));
      at(id).selectedIndex = Math.min(index, models.length - 1);
    }
  }

  show(open) {
    this.open = open;
    at("compare").hidden = !open;
    at("thread").hidden = open;
    at("compare-toggle").setAttribute("aria-pressed", String(open));
    at("input").focus();
  }

  stop() { this.running?.abort(); }

  async send(text) {
    if (this.running) return false;
    const values = this.parameters.values(), temperature = at("compare-temperature");
    if (!values || !temperature.reportValidity()) return false;
    values.temperature = Number(temperature.value);
    const stop = this.running = new AbortController();
    const sides = ["left-model", "right-model"].map((id) => (
      new Side(this.server.models.find((model) => model.id === at(id).value))));
    const result = element("p", "verdict", "Answering …");
    result.setAttribute("role", "status");
    const update = () => mark(sides, result);
    at("comparisons").append(element("article", "comparison", element("div", "turn user",
      element("div", "text", text)), result, element("div", "sides", ...sides.map((side) => side.node))));
    showStop(true);
    result.scrollIntoView({ block: "start" });
    await Promise.all(sides.map((side) => (
      side.run(text, this.parameters.system, values, stop.signal, update, this.labels))));
    update();
    this.running = null;
    showStop(false);
    return true;
  }
}

// One model's answer, token by token.
class Side {
  constructor(model) {
    this.model = model;
    this.tokens = [];  // {token, logprob, top, text}
    this.text = "";
    this.exact = true;
    this.ended = "";  // a finish_reason, "stopped" or "error"
    this.body = element("div", "side-text");
    this.chances = element("p", "chances");
    this.figures = element("p", "speed");
    const head = element("div", "side-head", element("h3", "", model.id), this.figures);
    this.node = element("section", "side writing", head, this.chances, this.body);
    this.node.setAttribute("aria-label", model.id);
  }

  request(text, system, values) {
    const { model } = this, asked = { model: model.id, ...values };
    if (!model.chat) return ["v1/completions", { ...asked, prompt: text, logprobs: ALTERNATIVES }];
    const messages = [{ role: "user", content: text }];
    if (system) messages.unshift({ role: "system", content: system });
    return ["v1/chat/completions", { ...asked, messages, logprobs: true, top_logprobs: ALTERNATIVES }];
  }

  async run(text, system, values, signal, update, labels) {
    const meter = new Meter();
    let frame = 0;
    try {
      for await (const event of stream(...this.request(text, system, values), signal)) {
        labels.set(event.id, titleOf(text));
        meter.count(event);
        for (const choice of event.choices) {
          this.take(choice);
          this.ended = choice.finish_reason ?? this.ended;
        }
        this.figures.textContent = meter.rate;
        frame ||= requestAnimationFrame(() => { frame = 0; update(); });
      }
    } catch (error) {
      this.ended = signal.aborted ? "stopped" : "error";
      if (!signal.aborted) this.node.append(element("div", "error", error.message));
    }
    cancelAnimationFrame(frame);
    this.node.classList.remove("writing");
    this.figures.textContent = meter.text(this.ended);
  }

  // A token's piece of text may be empty: a part of a character waits for the rest.
  take({ delta, text, logprobs }) {
    const piece = (delta ? (delta.reasoning_content || "") + (delta.content || "") : text) || "";
    const tokens = scored(logprobs);
    this.text += piece;
    for (const token of tokens) this.tokens.push({ ...token, text: "" });
    if (this.tokens.length) this.tokens.at(-1).text += piece;
    else if (piece) this.exact = false;
  }
}

// Tokens of either API: {token, logprob, top: [[token, logprob]]}.
function scored(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map(({ token, logprob, top_logprobs: top }) => (
      { token, logprob, top: top.map((other) => [other.token, other.logprob]) }));
  }
  const { tokens, token_logprobs: chosen, top_logprobs: top } = logprobs;
  return tokens.map((token, index) => (
    { token, logprob: chosen[index], top: Object.entries(top[index] ?? {}) }));
}

// Where two lists differ first, or -1: so far one begins like the other.
function difference(first, second) {
  const shorter = Math.min(first.length, second.length);
  for (let at = 0; at < shorter; at++) if (first[at] !== second[at]) return at;
  return -1;
}

function mark(sides, result) {
  const exact = sides.every((side) => side.exact);
  const pieces = sides.map((side) => (exact ? side.tokens.map(({ token }) => token) : [...side.text]));
  let where = difference(...pieces);
  const lengths = pieces.map((list) => list.length);
  if (where < 0 && complete(sides) && lengths[0] !== lengths[1]) where = Math.min(...lengths);
  sides.forEach((side, index) => {
    const texts = exact ? side.tokens.map(({ text }) => text) : pieces[index];
    const likely = exact && where >= 0 ? chances(sides, index, where) : "";
    side.body.replaceChildren(...divided(texts, where, likely));
    side.chances.textContent = likely && "Probability here: " + likely.replace("\n", ", ");
  });
  const unit = exact ? "token" : "character";
  result.textContent = where >= 0 ? `The first difference is ${unit} ${where + 1}.`
    : sameness(sides, Math.min(...lengths), unit);
  result.dataset.token = where;
}

// Whether both answers ended by themselves, so that an end can be a difference.
function complete(sides) { return sides.every(({ ended }) => !["", "stopped", "error"].includes(ended)); }

// What can be said of answers that don't differ in what both of them have.
function sameness(sides, length, unit) {
  const ended = sides.map((side) => side.ended), equal = count(length, unit) + ".";
  if (complete(sides)) return "The answers are equal: " + equal;
  if (ended.includes("error")) return "No comparison: an answer failed.";
  if (!ended.includes("stopped")) return "Equal so far: " + equal;
  return length ? "Stopped: equal so far, " + equal : "No comparison: it was stopped before both had begun.";
}

function divided(texts, where, title) {
  if (where < 0) return [element("span", "common", texts.join(""))];
  const [common, rest] = [texts.slice(0, where).join(""), texts.slice(where + 1).join("")];
  const text = texts[where] === undefined ? "⟨end⟩" : texts[where] || "⟨part of a character⟩";
  const differing = element("mark", "", text.replaceAll("\n", "⏎\n"));
  if (title) differing.title = title;
  return [element("span", "common", common), differing, rest];
}

// What this model thinks of both tokens.
function chances(sides, index, where) {
  const token = sides[index].tokens[where];
  if (!token) return "";
  const other = sides[1 - index].tokens[where];
  const known = new Map([...token.top, [token.token, token.logprob]]);
  return [token, other].filter(Boolean).map(({ token: text }) => {
    const chance = known.has(text) ? (Math.exp(known.get(text)) * 100).toFixed(1) + " %"
      : `not among the ${ALTERNATIVES} likeliest`;
    return `${JSON.stringify(text)}: ${chance}`;
  }).join("\n");
}
