"use strict";
// Requests to this server: answers as they stream, and how fast they come.

// What a refused request says: an error with the answer's `status`.
async function refusal(response) {
  let text = "the server answered " + response.status;
  try {
    text = (await response.json()).error.message;
  } catch { /* a proxy's page, which says no more than its status */ }
  return Object.assign(new Error(text), { status: response.status });
}

async function post(path, body, signal) {
  const response = await fetch(base + path, {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal });
  if (!response.ok) throw await refusal(response);
  return response;
}

async function get(path) {
  const response = await fetch(base + path);
  if (!response.ok) throw await refusal(response);
  return response.json();
}

// The events of a streamed answer. One that ends without its mark is incomplete.
async function* stream(path, body, signal) {
  const asked = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await post(path, asked, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the answer broke off");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

// Counts an answer's pieces until the server says how many tokens they were.
class Meter {
  constructor() {
    this.begun = performance.now();
    this.first = this.last = this.pieces = 0;
    this.tokens = null;
  }

  count(event) {
    if (event.usage) this.tokens = event.usage.completion_tokens;
    const written = event.choices.some(({ delta, text }) => (
      delta ? delta.content || delta.reasoning_content || delta.tool_calls : text));
    if (!written) return;
    this.last = performance.now();
    this.first ||= this.last;
    this.pieces += 1;
  }

  get rate() {
    const tokens = this.tokens ?? this.pieces;
    return tokens > 1 && this.last > this.first
      ? ((tokens - 1) / (this.last - this.first) * 1000).toFixed(1) + " tokens/s" : "";
  }

  // Of a finished answer.
  text(ended) {
    const end = { length: "cut at max tokens", stopped: "stopped", error: "failed" }[ended] ?? "";
    const first = this.first ? "first after " + seconds((this.first - this.begun) / 1000) : "";
    return [count(this.tokens ?? this.pieces, "token"), this.rate, first, end].filter(Boolean).join(" · ");
  }
}
