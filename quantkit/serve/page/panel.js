"use strict";
// Figures of one engine, each with a line of its last two minutes.

const FIGURES = [
  { id: "rate", label: "Tokens per second", series: [(sample) => sample.rate],
    text: (stats, { samples }) => mean(samples.slice(-4).map(({ rate }) => rate)).toFixed(1),
    detail: (stats) => count(stats.tokens_generated, "token") + " so far" },
  { id: "first", label: "Time to first token", list: (model) => [model.firsts],
    text: (stats, { firsts }) => (firsts.length ? seconds(firsts.at(-1)) : "–"),
    detail: (stats, { firsts }) => "of the last answer; line: " + count(firsts.length, "answer") },
  { id: "batch", label: "Batch", series: [({ running }) => running, ({ waiting }) => waiting],
    text: (stats) => stats.running + " running",
    detail: (stats) => `${stats.waiting} waiting · at most ${stats.max_batch} run · ${count(stats.preemptions, "preemption")}` },
  { id: "kv", label: "KV cache", series: [(sample) => sample.kv_pages_used, (sample) => sample.kv_pages_shared],
    text: (stats) => count(stats.kv_pages_used, "page"),
    detail: (stats) => [stats.kv_pages_total === null ? "" : "of " + stats.kv_pages_total.toLocaleString("en"),
      stats.kv_pages_shared.toLocaleString("en") + " shared", bytes(stats.kv_used_bytes), saving(stats)]
      .filter(Boolean).join(" · ") },
  { id: "prefix", label: "Prefix cache", series: [({ prefix_cache_bytes: size }) => size],
    text: (stats) => (stats.prefix_queries ? percent(stats.prefix_hits, stats.prefix_queries) + " hits" : "–"),
    detail: (stats) => `${stats.prefix_hits.toLocaleString("en")} of ${count(stats.prefix_queries, "token")} · ${bytes(stats.prefix_cache_bytes)}` },
  { id: "drafts", label: "Drafts", series: [({ newAccepted }) => newAccepted, ({ newDrafted, newAccepted }) => newDrafted - newAccepted],
    text: (stats) => (stats.drafted ? percent(stats.accepted, stats.drafted) + " accepted" : "none"),
    detail: (stats) => `${stats.accepted.toLocaleString("en")} accepted · ${(stats.drafted - stats.accepted).toLocaleString("en")} rejected` },
];

const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : 0);
const percent = (part, total) => (100 * part / total).toFixed(0) + " %";

// Bytes that the tokens in the cache would take more in 16 bits.
function saving(stats) {
  const { kv_bytes_per_token: stored, kv_bytes_per_token_bf16: plain, kv_used_bytes: used } = stats;
  if (!stored || stored >= plain) return "nothing saved against 16 bits";
  return `${bytes(used * (plain / stored - 1))} saved against 16 bits`;
}

class Panel {
  constructor() {
    this.cards = new Map();
    for (const figure of FIGURES) {
      const value = element("strong", "value"), detail = element("span", "detail");
      const chart = svg("svg", { viewBox: "0 0 120 28", preserveAspectRatio: "none", "aria-hidden": "true", class: "spark" });
      const card = element("div", "figure", element("span", "label", figure.label), value, chart, detail);
      card.id = "figure-" + figure.id;
      this.cards.set(figure, { value, detail, chart });
      at("figures").append(card);
    }
  }

  draw(model) {
    if (!model?.stats) return;
    for (const [figure, { value, detail, chart }] of this.cards) {
      value.textContent = figure.text(model.stats, model);
      detail.textContent = figure.detail(model.stats, model);
      const lists = figure.list ? figure.list(model) : figure.series.map((of) => model.samples.map(of));
      chart.replaceChildren(...sparklines(lists));
    }
  }
}

// Lines over a common scale from 0; the second is dashed.
function sparklines(lists) {
  const top = Math.max(1e-9, ...lists.flat()), length = Math.max(...lists.map((list) => list.length));
  if (length < 2) return [];
  return lists.map((list, index) => svg("polyline", {
    class: "line-" + (index + 1),
    points: list.map((value, at) => (
      `${(at / (length - 1) * 120).toFixed(1)},${(26 - value / top * 24).toFixed(1)}`)).join(" ") }));
}
