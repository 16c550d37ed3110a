"use strict";
// What the engines did, from `/trace`: asked for while somebody looks, and kept within bounds.

const POLL = 500, SAMPLES = 240;        // milliseconds; samples of a figure
const PAST = 300, LATER = 1e9;          // seconds: how far it looks back at first; a time without spans yet
const MAX_REQUESTS = 400, MAX_SPANS = 60000;

// A request of an engine: its spans, in order of time.
class TracedRequest {
  constructor(model, id, choice) {
    Object.assign(this, { model, id, choice, spans: [], start: Infinity, end: 0, reason: "", totals: {} });
    for (const name of ["queue", "prefill", "decode", "prompt", "cached", "tokens", "drafted", "accepted"]) {
      this.totals[name] = 0;
    }
    this.firstToken = null;
  }

  add(span) {
    const { totals } = this;
    this.start = Math.min(this.start, span.start);
    this.end = Math.max(this.end, span.end);
    if (span.kind === "end") this.reason = span.reason;
    this.spans.push(span);
    if (span.kind in totals) totals[span.kind] += span.end - span.start;
    if (span.kind === "prefill") {
      totals.prompt += span.tokens + (span.cached ?? 0);
      totals.cached += span.cached ?? 0;
    }
    if (span.kind !== "decode") return;
    this.firstToken ??= span.end;
    for (const name of ["tokens", "drafted", "accepted"]) totals[name] += span[name] ?? 0;
  }
}

class Trace {
  constructor(changed) {
    this.changed = changed;  // called after each answer
    this.timer = 0;
    this.open = false;
    this.reset();
    document.addEventListener("visibilitychange", () => this.poll());
  }

  reset() {
    this.now = 0;
    this.requests = new Map();
    this.models = new Map();  // name → {stats, samples, firsts}
    this.spans = 0;
  }

  watch(open) {
    this.open = open;
    this.poll();
  }

  async poll() {
    clearTimeout(this.timer);
    if (!this.open || document.hidden || this.polling) return;
    this.polling = true;
    let error = "";
    try {
      const since = this.now || Math.max(0, (await get("trace?since=" + LATER)).now - PAST);
      this.take(await get("trace?since=" + since));
    } catch (failure) {
      error = failure.message;
      if (failure.status === 404) this.open = false;  // this server has none, so that it isn't asked again
    }
    this.polling = false;
    this.changed(error);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.poll(), POLL);
  }

  take({ now, models }) {
    if (now < this.now) return this.reset();  // another process answers: its clock is another one
    const passed = now - this.now;
    this.now = now;
    for (const { model, stats, spans } of models) {
      for (const span of spans) this.add(model, span);
      this.sample(model, stats, passed);
    }
    this.trim();
  }

  add(model, span) {
    const key = `${model} ${span.request} ${span.choice ?? 0}`;
    let request = this.requests.get(key);
    if (!request) this.requests.set(key, request = new TracedRequest(model, span.request, span.choice));
    const waits = request.firstToken === null;
    request.add(span);
    this.spans += 1;
    if (waits && request.firstToken !== null) this.of(model).firsts.push(request.firstToken - request.start);
  }

  of(model) {
    if (!this.models.has(model)) this.models.set(model, { stats: null, samples: [], firsts: [] });
    return this.models.get(model);
  }

  sample(model, stats, passed) {
    const known = this.of(model), before = known.stats;
    known.stats = stats;
    known.firsts.splice(0, known.firsts.length - SAMPLES);
    if (!before) return;  // rates need two answers
    const change = (name) => Math.max(0, stats[name] - before[name]);
    known.samples.push({ ...stats, rate: change("tokens_generated") / passed, newDrafted: change("drafted"),
      newAccepted: change("accepted") });
    known.samples.splice(0, known.samples.length - SAMPLES);
  }

  // The oldest requests go first.
  trim() {
    if (this.requests.size <= MAX_REQUESTS && this.spans <= MAX_SPANS) return;
    const oldest = [...this.requests].sort(([, first], [, second]) => first.end - second.end);
    for (const [key, request] of oldest) {
      if (this.requests.size <= MAX_REQUESTS && this.spans <= MAX_SPANS) break;
      if (this.requests.size === 1) break;
      this.requests.delete(key);
      this.spans -= request.spans.length;
    }
  }

  // Trace events as Perfetto and chrome://tracing read them.
  perfetto() {
    const names = [...this.models.keys()], events = [];
    names.forEach((name, process) => events.push(
      { name: "process_name", ph: "M", pid: process + 1, tid: 0, args: { name } }));
    [...this.requests.values()].forEach((request, thread) => {
      const place = { pid: names.indexOf(request.model) + 1, tid: thread + 1 };
      events.push({ name: "thread_name", ph: "M", ...place, args: { name: nameOf(request) } });
      for (const { kind, start, end, request: id, ...args } of request.spans) {
        events.push({ name: kind, ph: "X", ts: start * 1e6, dur: (end - start) * 1e6, ...place, args });
      }
    });
    return JSON.stringify({ displayTimeUnit: "ms", traceEvents: events });
  }
}

function nameOf(request) {
  return request.id + (request.choice === undefined ? "" : " #" + request.choice);
}
