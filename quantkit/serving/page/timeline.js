"use strict";
// Requests as bars over time, on a canvas: thousands of spans are drawn in one pass.

const ROW = 24, AXIS = 22, MIN_WINDOW = 0.02, MAX_WINDOW = 3600, MAX_ROWS = 60;
// Okabe and Ito's colours; heights and patterns differ too, so that no colour is needed to tell kinds apart
const KINDS = {
  queue: { label: "queued", color: "#999999", top: 9, height: 4 },
  prefill: { label: "prefill chunk", color: "#e69f00", top: 2, height: 18 },
  decode: { label: "decode step", color: "#0072b2", top: 5, height: 12 },
  accepted: { label: "accepted draft, or committed", color: "#009e73", top: 5, height: 12 },
  rejected: { label: "rejected draft, or a mask", color: "#d55e00", top: 5, height: 12, hatched: true },
  preempted: { label: "preempted", color: "#cc79a7", top: 1, height: 20 },
  end: { label: "end", color: null, top: 4, height: 14 },
};

class Timeline {
  constructor(trace, labels) {
    this.trace = trace;
    this.labels = labels;  // first words of prompts of this page, by request
    this.canvas = at("timeline");
    this.context = this.canvas.getContext("2d");
    this.window = 20;      // seconds that are shown
    this.right = 0;        // time at the right edge
    this.following = true;
    this.hits = [];
    this.pattern = hatching(KINDS.rejected.color);
    this.listen();
    this.legend();
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  legend() {
    for (const [kind, { label, color, height }] of Object.entries(KINDS)) {
      const divides = ["accepted", "rejected"].includes(kind) ? "of-steps" : "";
      const swatch = element("span", "swatch swatch-" + kind);
      swatch.style.height = height + "px";
      swatch.style.color = color ?? "var(--ink)";
      at("legend").append(element("li", divides, swatch, label));
    }
  }

  get gutter() { return Math.min(130, this.width * 0.28); }

  get span() { return Math.max(1, this.width - this.gutter - 8); }

  x(time) { return this.gutter + (time - this.right + this.window) / this.window * this.span; }

  time(x) { return this.right - this.window + (x - this.gutter) / this.span * this.window; }

  draw() {
    const box = this.canvas.parentElement;
    if (!box.clientWidth) return;
    if (this.following) this.right = this.trace.now;
    this.width = box.clientWidth;
    const from = this.right - this.window;
    const requests = [...this.trace.requests.values()]
      .filter(({ start, end }) => end >= from && start <= this.right)
      .sort((first, second) => first.start - second.start).slice(-MAX_ROWS);
    this.resize(Math.max(3, requests.length) * ROW + AXIS);
    this.style = getComputedStyle(this.canvas);
    this.context.clearRect(0, 0, this.width, this.height);
    this.hits = [];
    this.axis();
    requests.forEach((request, row) => this.row(request, row * ROW));
    if (!requests.length) this.text("No requests in these seconds.", this.gutter + 8, ROW, "--soft");
    const content = `${count(requests.length, "request")}, ${count(this.hits.length, "span")}`;
    this.canvas.setAttribute("aria-label",
      `Timeline of ${seconds(this.window)}: ${content}; the table below has the numbers`);
    this.table();
  }

  resize(height) {
    const ratio = window.devicePixelRatio || 1;
    const pixels = [this.width, height].map((size) => Math.round(size * ratio));
    this.height = height;
    this.canvas.style.height = height + "px";
    if (this.canvas.width !== pixels[0]) this.canvas.width = pixels[0];
    if (this.canvas.height !== pixels[1]) this.canvas.height = pixels[1];
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
  }

  color(name) { return this.style.getPropertyValue(name); }

  text(text, x, y, color, width) {
    this.context.fillStyle = this.color(color);
    this.context.font = "11px system-ui, sans-serif";
    this.context.fillText(text, x, y, width);
  }

  axis() {
    const { context } = this, bottom = this.height - AXIS;
    const rough = this.window / Math.max(2, this.span / 90), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
    context.fillStyle = this.color("--line");
    context.fillRect(this.gutter, bottom, this.span, 1);
    for (let tick = Math.ceil((this.right - this.window) / step) * step; tick <= this.right; tick += step) {
      if (tick < -step / 2) continue;
      const x = this.x(tick);
      context.fillStyle = this.color("--line");
      context.fillRect(x, 0, 1, bottom + 4);
      const label = tick.toFixed(Math.max(0, -Math.floor(Math.log10(step) + 1e-9))) + " s";
      if (x + 40 < this.width) this.text(label, x + 2, bottom + 15, "--soft");
    }
  }

  row(request, y) {
    this.text(shortened(this.label(request), this.gutter), 2, y + 16, "--ink", this.gutter - 8);
    let drawn = -1;  // pixel columns that are full already needn't be filled again
    const from = this.right - this.window;
    for (const span of request.spans) {
      if (span.end < from || span.start > this.right) continue;
      const left = Math.max(this.gutter, this.x(span.start));
      const right = Math.min(this.gutter + this.span, this.x(span.end));
      this.hits.push({ request, span, left, right: Math.max(right, left + 2), top: y, bottom: y + ROW });
      if (right - left < 1 && Math.floor(left) === drawn && span.kind === "decode" && !span.drafted) continue;
      drawn = Math.floor(left);
      this.bar(span, left, Math.max(1, right - left), y, this.blocks(request));
    }
  }

  // Whether the model writes blocks: then drafted tokens are masks, and accepted ones were committed.
  blocks(request) { return (this.trace.of(request.model).stats?.block_size ?? 1) > 1; }

  bar(span, left, width, y, blocks) {
    const gap = width > 4 ? 1 : 0;
    if (span.kind === "preempted" || span.kind === "end") return this.fill(span.kind, left - 1, 2, y);
    if (span.kind !== "decode" || !span.drafted) return this.fill(span.kind, left, width - gap, y);
    // a step's bar is divided by what became of its tokens: the model's own, accepted and rejected drafts
    const size = (width - gap) / (span.drafted + (blocks ? 0 : 1)), accepted = span.accepted * size;
    const own = blocks ? 0 : size;
    this.fill("decode", left, own, y);
    this.fill("accepted", left + own, accepted, y);
    this.fill("rejected", left + own + accepted, width - gap - own - accepted, y);
  }

  fill(kind, left, width, y) {
    const { color, top, height, hatched } = KINDS[kind];
    this.context.fillStyle = hatched && width >= 3 ? this.pattern : color ?? this.color("--ink");
    if (width > 0) this.context.fillRect(left, y + top, width, height);
  }

  label(request) {
    const choice = request.choice === undefined ? "" : " #" + request.choice;
    const words = this.labels.get(request.id);
    if (words) return `“${words}”${choice}`;
    const name = request.id.replace(/^\w+[-_](.{6}).*/, "$1") + choice;
    return this.trace.models.size > 1 ? `${request.model} ${name}` : name;
  }

  // The newest requests, for those who can't see or point at bars.
  table() {
    const requests = [...this.trace.requests.values()];
    const newest = requests.sort((first, second) => second.start - first.start).slice(0, 8);
    at("requests").tBodies[0].replaceChildren(...newest.map((request) => {
      const { totals } = request, times = [totals.queue, totals.prefill, totals.decode].map(seconds);
      const drafts = totals.drafted ? `${totals.accepted} of ${totals.drafted}` : "–";
      const cells = [...times, plain(totals.prompt), plain(totals.cached), plain(totals.tokens)];
      const head = element("th", "", shortened(this.label(request), 130));
      head.scope = "row";
      head.title = `${request.model}, ${request.id}`;
      return element("tr", "", head, ...cells.map((cell) => element("td", "", cell)),
        element("td", "of-drafts", drafts));
    }));
  }

  // --- moving about ---

  listen() {
    const { canvas } = this;
    canvas.addEventListener("wheel", (event) => {
      const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
      if (!sideways && !event.ctrlKey && document.activeElement !== canvas) return;  // the panel scrolls
      event.preventDefault();
      if (sideways) this.move(event.deltaX / this.span * this.window);
      else this.zoom(Math.exp(event.deltaY * 0.0015), this.following ? this.right : this.time(event.offsetX));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      this.drag = { x: event.clientX, right: this.right };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerup", (event) => { this.drag = null; this.tip(event); });
    canvas.addEventListener("pointercancel", () => { this.drag = null; });
    canvas.addEventListener("pointerleave", () => { at("tip").hidden = true; });
    canvas.addEventListener("keydown", (event) => {
      const keys = {
        ArrowLeft: () => this.move(-this.window / 8), ArrowRight: () => this.move(this.window / 8),
        "+": () => this.zoom(0.7), "=": () => this.zoom(0.7), "-": () => this.zoom(1 / 0.7) };
      if (!keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    });
    at("follow").addEventListener("click", () => this.follow(!this.following));
    at("zoom-in").addEventListener("click", () => this.zoom(0.6));
    at("zoom-out").addEventListener("click", () => this.zoom(1 / 0.6));
    at("download-trace").addEventListener("click", () => (
      download("trace.json", "application/json", this.trace.perfetto())));
  }

  point(event) {
    if (!this.drag) return this.tip(event);
    const moved = event.clientX - this.drag.x;
    if (Math.abs(moved) < 3 && this.following) return;
    this.follow(false);
    this.right = this.drag.right - moved / this.span * this.window;
    this.draw();
  }

  follow(on) {
    this.following = on;
    at("follow").setAttribute("aria-pressed", String(on));
    this.draw();
  }

  zoom(factor, fixed = this.following ? this.right : this.right - this.window / 2) {
    const window = Math.min(MAX_WINDOW, Math.max(MIN_WINDOW, this.window * factor));
    this.right = fixed + (this.right - fixed) * window / this.window;
    this.window = window;
    this.draw();
  }

  move(by) {
    this.following = false;
    this.right += by;
    this.follow(false);
  }

  tip(event) {
    const { offsetX: x, offsetY: y } = event, tip = at("tip");
    const hit = this.hits.findLast(({ left, right, top, bottom }) => (
      x >= left - 1 && x <= right + 1 && y >= top && y < bottom));
    tip.hidden = !hit;
    if (!hit) return;
    const { request, span } = hit;
    const name = `${request.model}, ${nameOf(request)}`;
    tip.textContent = [this.label(request), name, described(span, this.blocks(request))].join("\n");
    tip.style.top = (y > 90 ? y - tip.offsetHeight - 8 : y + 16) + "px";
    tip.style.left = Math.max(0, Math.min(x - 20, this.width - tip.offsetWidth - 4)) + "px";
  }
}

function described(span, blocks) {
  const name = { end: "ended: " + span.reason, preempted: "preempted" }[span.kind];
  if (name) return `${name} at ${span.start.toFixed(3)} s`;
  const time = `${seconds(span.end - span.start)} from ${span.start.toFixed(3)} s`;
  const parts = [`${KINDS[span.kind].label}, ${time}`];
  if (span.tokens !== undefined) parts.push(count(span.tokens, "token"));
  if (span.cached) parts.push(span.cached + " from the prefix cache");
  if (span.drafted && blocks) parts.push(`${span.accepted} of ${count(span.drafted, "mask")} committed`);
  else if (span.drafted) parts.push(`${span.accepted} of ${count(span.drafted, "draft")} accepted`);
  return parts.join("\n");
}

function shortened(text, width) {
  const limit = Math.max(6, Math.floor(width / 6));
  return text.length > limit ? text.slice(0, limit - 1) + "…" : text;
}

// Stripes, for what must not be told by its colour alone.
function hatching(color) {
  const tile = document.createElement("canvas"), context = tile.getContext("2d");
  tile.width = tile.height = 5;
  context.strokeStyle = color;
  context.lineWidth = 1.8;
  for (const shift of [-5, 0, 5]) {
    context.moveTo(shift, 5);
    context.lineTo(shift + 5, 0);
  }
  context.stroke();
  return context.createPattern(tile, "repeat");
}
