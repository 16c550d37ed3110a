"use strict";
// Figures of one engine, each with a line of its last two minutes.

const FIGURES = [
  { id: "rate", label: "Tokens per second",
    lines: ({ samples }) => [samples.map(({ rate }) => rate)],
    text: (stats, { samples }) => mean(samples.slice(-4).map(({ rate }) => rate)).toFixed(1),
    details: (stats) => [count(stats.tokens_generated, "token") + " so far"] },
  { id: "first", label: "Time to first token",
    lines: ({ firsts }) => [firsts],
    text: (stats, { firsts }) => (firsts.length ? seconds(firsts.at(-1)) : "–"),
    details: (stats, { firsts }) => ["the last of " + count(firsts.length, "answer")] },
  { id: "batch", label: "Batch",
    lines: ({ samples }) => [samples.map(({ running }) => running), samples.map(({ waiting }) => waiting)],
    text: (stats) => stats.running + " running",
    details: (stats) => [stats.waiting + " waiting", `at most ${stats.max_batch} run`,
      count(stats.preemptions, "preemption")] },
  { id: "kv", label: "KV cache",
    lines: ({ samples }) => [samples.map((sample) => sample.kv_used_bytes)],
    text: (stats) => bytes(stats.kv_used_bytes),
    limit: (stats) => (stats.kv_pages_total === null ? "" : " of " + bytes(stats.kv_allocated_bytes)),
    details: (stats) => [stats.kv_pages_total === null ? "grows as needed" : "", unquantized(stats)] },
  { id: "prefix", label: "Prefix cache hits",
    lines: ({ samples }) => [samples.map((sample) => sample.prefix_cache_bytes)],
    text: (stats) => percent(stats.prefix_hits, stats.prefix_queries),
    details: (stats) => [`${plain(stats.prefix_hits)} of ${count(stats.prefix_queries, "token")}`,
      bytes(stats.prefix_cache_bytes)] },
  { id: "drafts", label: "Drafts accepted",
    lines: ({ samples }) => [samples.map(({ newAccepted }) => newAccepted),
      samples.map(({ newDrafted, newAccepted }) => newDrafted - newAccepted)],
    text: (stats) => percent(stats.accepted, stats.drafted),
    details: (stats) => [plain(stats.accepted) + " accepted",
      plain(stats.drafted - stats.accepted) + " rejected"] },
];

const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : 0);
const percent = (part, total) => (total ? (100 * part / total).toFixed(0) + " %" : "–");
const plain = (number) => number.toLocaleString("en");

// What the tokens in the cache would take in 16 bits, where that is something else.
function unquantized(stats) {
  const { kv_bytes_per_token: stored, kv_bytes_per_token_bf16: half, kv_used_bytes: used } = stats;
  return stored === half || !used ? "" : `${bytes(used * half / stored)} in 16 bits`;
}

class Panel {
  constructor() {
    this.cards = new Map();
    for (const figure of FIGURES) {
      const value = element("strong", "value"), detail = element("span", "detail");
      const chart = svg("svg", {
        viewBox: "0 0 120 28", preserveAspectRatio: "none", "aria-hidden": "true", class: "spark" });
      const card = element("div", "figure", element("span", "label", figure.label), value, chart, detail);
      card.id = "figure-" + figure.id;
      if (figure.id === "drafts") card.classList.add("of-drafts");
      this.cards.set(figure, { value, detail, chart });
      at("figures").append(card);
    }
  }

  draw(model) {
    if (!model?.stats) return;
    at("live").classList.toggle("drafts", model.stats.drafted > 0);
    at("live").classList.toggle("blocks", model.stats.block_size > 1);
    for (const [figure, { value, detail, chart }] of this.cards) {
      const limit = element("small", "", figure.limit?.(model.stats));
      value.replaceChildren(figure.text(model.stats, model), limit);
      detail.textContent = figure.details(model.stats, model).filter(Boolean).join(" · ");
      chart.replaceChildren(...sparklines(figure.lines(model)));
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
