"use strict";
// What is sent with every request. An empty field isn't sent: the server's default holds then.

const FIELDS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, initial: "0.7", hint: "0 is greedy; 0 to 2" },
  { name: "max_tokens", label: "Max tokens", min: 1, max: 2 ** 31, whole: true, hint: "of an answer" },
  { name: "top_p", label: "Top p", min: 0.001, max: 1, hint: "likeliest tokens that reach p; to 1" },
  { name: "top_k", label: "Top k", min: 0, max: 2 ** 31 - 1, whole: true, hint: "the k likeliest; 0 is all" },
  { name: "min_p", label: "Min p", min: 0, max: 1, hint: "share of the likeliest's; 0 to 1" },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.01, max: 100, hint: "1 is none" },
  { name: "seed", label: "Seed", min: 0, max: Number.MAX_SAFE_INTEGER, whole: true, hint: "empty draws one" },
  { name: "kv", label: "KV cache", text: true, hint: "empty is the server's" },
  { name: "stop", label: "Stop texts", text: true, lines: true, hint: "one a line; they end an answer" },
];
const KV_SETTINGS = ["none", "int8", "fp8", "int4", "window(1024, sinks=4)+int8", "snapkv(0.5)+int8"];

class Parameters {
  constructor(store) {
    this.store = store;
    this.inputs = new Map();
    for (const field of FIELDS) this.add(field);
    this.fill(store.read("parameters") ?? {});
    at("parameters").addEventListener("input", () => { this.check(); this.save(); });
    at("settings").addEventListener("close", () => { at("refused").textContent = ""; });
    at("reset").addEventListener("click", () => { this.fill({}); this.save(); });
  }

  add(field) {
    const input = element(field.lines ? "textarea" : "input");
    input.id = "field-" + field.name;
    if (field.lines) input.rows = 2;
    else if (field.text) input.setAttribute("list", "kv-settings");
    else {
      input.type = "text";  // a number field gives no text that isn't a number, and nothing to complain about
      input.inputMode = field.whole ? "numeric" : "decimal";
    }
    input.autocomplete = "off";
    const hint = element("span", "hint-text", field.hint);
    hint.id = input.id + "-hint";
    input.setAttribute("aria-describedby", hint.id);
    at("fields").append(element("label", field.lines ? "wide" : "", field.label, input, hint));
    this.inputs.set(field, { input, hint });
  }

  // The model's part: what can't be set for it, and what it does without a setting.
  describe(model) {
    this.limit = Math.min(512, Math.floor(model.max_model_len / 2));
    at("system-label").hidden = !model.chat;
    at("kv-settings").replaceChildren(...KV_SETTINGS.map((kv) => element("option", "", kv)));
    at("field-max_tokens").placeholder = this.limit;
    at("field-kv").placeholder = model.kv;
  }

  fill(values) {
    at("system").value = values.system ?? "";
    for (const [field, { input }] of this.inputs) input.value = values[field.name] ?? field.initial ?? "";
    this.check();
  }

  save() {
    const values = { system: at("system").value };
    for (const [field, { input }] of this.inputs) values[field.name] = input.value;
    this.store.write("parameters", values);
  }

  get system() { return at("system").value.trim(); }

  // Marks what is out of range. Returns the labels of those fields.
  check() {
    const wrong = [];
    for (const [field, { input, hint }] of this.inputs) {
      const problem = complaint(field, input.value.trim());
      input.setAttribute("aria-invalid", String(Boolean(problem)));
      hint.textContent = problem || field.hint;
      hint.classList.toggle("problem", Boolean(problem));
      if (problem) wrong.push(field.label);
    }
    return wrong;
  }

  // The parameters of a request, or null: something is out of range, and the settings show what.
  values() {
    const wrong = this.check();
    if (wrong.length) {
      at("refused").textContent = "Nothing was sent: " + wrong.join(", ") + " can't be used.";
      at("settings").showModal();
      return null;
    }
    const values = { max_tokens: this.limit };
    for (const [field, { input }] of this.inputs) {
      const text = field.lines ? input.value : input.value.trim();
      if (field.lines) {
        const lines = text.split("\n").filter(Boolean);
        if (lines.length) values[field.name] = lines;
      } else if (text) values[field.name] = field.text ? text : numeric(field, text);
    }
    return values;
  }
}

// A comma may be the decimal sign. In a whole number it would be a separator, and is refused.
function numeric(field, text) { return Number(field.whole ? text : text.replace(",", ".")); }

function complaint(field, text) {
  if (field.text || !text) return "";
  const value = numeric(field, text);
  if (Number.isNaN(value)) return "is no number";
  if (field.whole && !Number.isInteger(value)) return "must be a whole number";
  if (value < field.min) return "must be at least " + field.min;
  return value > field.max ? "must be at most " + field.max.toLocaleString("en") : "";
}
