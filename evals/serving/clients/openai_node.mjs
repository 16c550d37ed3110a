// OpenAI's client for Node against a running server.
//
//   quantkit serve-local MODEL
//   node evals/serving/clients/openai_node.mjs [URL] [FOLDER]
//
// FOLDER has node_modules with the client (`npm install openai` there); by default it is the current folder.
// The last line is `N passed, M failed`; the exit code is 1 if any failed.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";

if (process.argv.includes("--help") || process.argv.includes("-h")) {
  const lines = readFileSync(new URL(import.meta.url), "utf8").split("\n");
  console.log(lines.slice(0, lines.indexOf("")).map((line) => line.replace(/^\/\/ ?/, "")).join("\n"));
  process.exit(0);
}
const url = (process.argv[2] ?? "http://127.0.0.1:8000").replace(/\/+$/, "").replace(/\/v1$/, "");
const require = createRequire(path.resolve(process.argv[3] ?? ".", "x.js"));
const { OpenAI } = require("openai");
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, timeout: 120_000 });
const model = (await client.models.list()).data[0].id;
const ask = {
  model, max_tokens: 24, temperature: 0,
  messages: [{ role: "user", content: "What is the capital of France?" }],
};
const weather = {
  type: "object", additionalProperties: false, required: ["city", "days"],
  properties: {
    city: { type: "string", maxLength: 20 }, days: { type: "integer", minimum: 1, maximum: 9 },
  },
};
const tools = [{ type: "function", function: { name: "weather", parameters: weather } }];
const named = { type: "function", function: { name: "weather" } };
let passed = 0, failed = 0;

async function check(label, test) {
  try {
    await test();
    passed += 1;
    console.log(`ok     ${label}`);
  } catch (error) {
    failed += 1;
    console.log(`FAILED ${label}: ${error.constructor.name}: ${String(error.message).slice(0, 400)}`);
  }
}

function fits(text) {
  const value = JSON.parse(text);
  assert.deepEqual(Object.keys(value).sort(), ["city", "days"]);
  assert.ok(typeof value.city === "string" && value.city.length <= 20);
  assert.ok(Number.isInteger(value.days) && value.days >= 1 && value.days <= 9);
}

let text = "";
await check("chat", async () => {
  const done = await client.chat.completions.create(ask);
  text = done.choices[0].message.content;
  assert.ok(text.length > 0 && done.usage.total_tokens > done.usage.completion_tokens);
});
await check("chat, streamed: the same text, usage at the end", async () => {
  let streamed = "", usage = null;
  const options = { stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await client.chat.completions.create({ ...ask, ...options })) {
    streamed += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(streamed, text);
  assert.ok(usage.completion_tokens > 0);
});
await check("chat, the client's stream helper", async () => {
  const runner = client.chat.completions.stream(ask);
  let streamed = "";
  runner.on("content", (delta) => { streamed += delta; });
  assert.equal(await runner.finalContent(), text);
  assert.equal(streamed, text);
});
await check("a stream that is aborted doesn't disturb the next request", async () => {
  const stream = await client.chat.completions.create({ ...ask, max_tokens: 500, stream: true });
  for await (const _ of stream) break;
  stream.controller.abort();
  assert.equal((await client.chat.completions.create(ask)).choices[0].message.content, text);
});
await check("eight requests at once have the same text as alone", async () => {
  const many = await Promise.all(Array.from({ length: 8 }, () => client.chat.completions.create(ask)));
  for (const done of many) assert.equal(done.choices[0].message.content, text);
});
await check("response_format json_schema", async () => {
  const json_schema = { name: "weather", schema: weather, strict: true };
  const done = await client.chat.completions.create({
    ...ask, max_tokens: 200, response_format: { type: "json_schema", json_schema } });
  fits(done.choices[0].message.content);
});
await check("chat.completions.parse", async () => {
  const json_schema = { name: "weather", schema: weather, strict: true };
  const done = await client.chat.completions.parse({
    ...ask, max_tokens: 200, response_format: { type: "json_schema", json_schema } });
  fits(done.choices[0].message.content);
});
await check("a tool that is named is called, and its result answered", async () => {
  const first = await client.chat.completions.create({ ...ask, max_tokens: 200, tools, tool_choice: named });
  const message = first.choices[0].message;
  fits(message.tool_calls[0].function.arguments);
  const results = message.tool_calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: "Sunny" }));
  const done = await client.chat.completions.create({
    ...ask, tools, tool_choice: "none", messages: [...ask.messages, message, ...results] });
  assert.ok(done.choices[0].message.content);
});
await check("runTools calls a function of ours", async () => {
  const called = [];
  const runner = client.chat.completions.runTools({
    ...ask, max_tokens: 200, tool_choice: named, tools: [{ type: "function", function: {
      name: "weather", parameters: weather, parse: JSON.parse,
      function: (given) => { called.push(JSON.stringify(given)); return "Sunny, 21 degrees"; } } }],
  }, { maxChatCompletions: 2 });
  await runner.done();
  assert.ok(called.length >= 1);
  called.forEach(fits);
});
await check("completions: plain and streamed are the same", async () => {
  const body = { model, prompt: "Once upon a time", max_tokens: 12, temperature: 0 };
  const done = await client.completions.create(body);
  let streamed = "";
  for await (const chunk of await client.completions.create({ ...body, stream: true })) {
    streamed += chunk.choices[0].text;
  }
  assert.equal(streamed, done.choices[0].text);
});
await check("embeddings", async () => {
  const done = await client.embeddings.create({ model, input: ["a harbour", "a lantern"] });
  assert.equal(done.data.length, 2);
  assert.ok(Math.abs(done.data[0].embedding.reduce((sum, value) => sum + value * value, 0) - 1) < 1e-3);
});
await check("responses: plain and streamed are the same", async () => {
  const body = { model, input: "What is the capital of France?", max_output_tokens: 32, temperature: 0 };
  const done = await client.responses.create(body);
  let streamed = "", last = "";
  for await (const event of await client.responses.create({ ...body, stream: true })) {
    if (event.type === "response.output_text.delta") streamed += event.delta;
    last = event.type;
  }
  assert.ok(done.output_text.length > 0);
  assert.equal(streamed, done.output_text);
  assert.ok(["response.completed", "response.incomplete"].includes(last));
});
await check("responses, the client's stream helper", async () => {
  const stream = client.responses.stream({ model, input: "Say hello.", max_output_tokens: 32 });
  const final = await stream.finalResponse();
  assert.ok(final.output.length > 0);
});
await check("errors: 404 and 400 by the client's classes, with code and param", async () => {
  await assert.rejects(client.models.retrieve("no-such-model"),
    (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found");
  await assert.rejects(client.chat.completions.create({ ...ask, temperature: 9 }),
    (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature");
});
console.log(`openai ${require("openai/version").VERSION} for Node: ${passed} passed, ${failed} failed`);
process.exit(failed ? 1 : 0);
