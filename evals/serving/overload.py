"""A server under ten times the load that it can bear: is every body right, and does its memory stay flat?

    quantkit serve-local MODEL --port 8001 --max-batch 4 --max-queue 8
    python evals/serving/load.py overload http://127.0.0.1:8001 [--clients 64] [--times 10] [--minutes 3]

First every request is sent alone, and its answer is kept. Then the server's capacity is measured: the
requests that a few clients get answered in a second. Then clients send ten times as many for three minutes:
chats and texts, streaming and not, long and short, sampled, with tools and schemas, and some that hang up.
Every answer is checked: its status is 200, or 503 with ``Retry-After`` and an error body; JSON and events are
whole and have OpenAI's shape; text, calls, finish reason and usage equal those of the same request alone.
``/health`` must answer all the while. Resident memory is sampled every second. At the end no request may be
left in the server, and all must give the same answers again.

Kinds of requests that the server refuses with 400 when they are alone, for instance schemas without the extra
for them, are named and left out. Exit code 1 if anything is wrong: a body, a 503 later than 100 ms for more
than one in a hundred, memory that grows by more than 5% from the second minute to the last seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from client import SHORT, Clock, Response, model_of, quantile, resident, send, server_process, text

LATE = 100
"""Milliseconds within which a request must be refused."""
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20},
                                           "people": {"type": "integer", "minimum": 0, "maximum": 10**8},
                                           "kind": {"enum": ["capital", "town", "village"]}},
          "required": ["city", "people", "kind"], "additionalProperties": False}
TOOL = {"type": "function", "function": {
    "name": "weather", "description": "The weather of a place.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string", "maxLength": 20},
                                                    "days": {"type": "integer", "minimum": 1, "maximum": 9}},
                   "required": ["place", "days"], "additionalProperties": False}}}


class WrongBodyError(Exception):
    """A body isn't what it must be. The text says how."""


@dataclass(frozen=True)
class LoadCase:
    """One request of the load, and how it may be left.

    Attributes:
        kind: for the summary.
        leave_after: events after which the client hangs up; 0: at once; ``None``: it reads to the end.
    """

    kind: str
    path: str
    body: Mapping[str, Any]
    leave_after: int | None = None


def cases(model: str, seed: str) -> list[LoadCase]:
    """Requests of every kind. Each gives the same answer whenever it is sent: greedy, or with a seed."""
    random_ = random.Random(f"overload {seed}")
    base: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 24}
    options = {"stream": True, "stream_options": {"include_usage": True}}

    def chat(message: str) -> dict[str, Any]:
        return base | {"messages": [{"role": "user", "content": message}]}

    long = [f"Shorten this. {text(random_, 1500)}" for _ in range(2)]
    made = []
    for index, question in enumerate(SHORT):
        made += [LoadCase("chat", CHAT, chat(question)),
                 LoadCase("chat stream", CHAT, chat(question) | options),
                 LoadCase("hang up in a stream", CHAT, chat(question) | options | {"max_tokens": 200},
                          leave_after=3 + index)]
    for message in long:
        made += [LoadCase("long chat stream", CHAT, chat(message) | options),
                 LoadCase("hang up at once", CHAT, chat(message), leave_after=0),
                 LoadCase("hang up at once", CHAT, chat(message) | options, leave_after=0),
                 LoadCase("text", TEXT, base | {"prompt": message[:400]}),
                 LoadCase("text stream", TEXT, base | options | {"prompt": message[:400], "logprobs": 2})]
    sampled = {"temperature": 0.9, "seed": 7, "n": 2}
    weather = {"tools": [TOOL], "max_tokens": 128,
               "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    schema = {"max_tokens": 128, "response_format": {
        "type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}}
    made += [LoadCase("two choices", CHAT, chat(SHORT[0]) | sampled),
             LoadCase("two choices stream", CHAT, chat(SHORT[1]) | sampled | options),
             LoadCase("tool", CHAT, chat("How is the weather in Paris for two days?") | weather),
             LoadCase("tool stream", CHAT, chat("The weather in Oslo, four days?") | weather | options),
             LoadCase("schema", CHAT, chat("Describe Rome as JSON.") | schema),
             LoadCase("schema stream", CHAT, chat("Describe Bern as JSON.") | schema | options)]
    return made


def answer_of(case: LoadCase, response: Response) -> dict[str, Any]:
    """What a client has at the end of a 200, without names and times that differ each time.

    Raises:
        WrongBodyError: it is cut, isn't JSON or an event stream, or lacks what OpenAI's clients read.
    """
    if response.error:
        raise WrongBodyError(f"the answer is cut: {response.error}")
    try:
        streams = case.body.get("stream")
        answer = _streamed(case, response) if streams else _plain(case, response.json())
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raw = response.body[:200] or [data[:120] for _, data in response.events[-3:]]
        raise WrongBodyError(f"{type(error).__name__}: {error} in {raw!r}") from None
    if "tools" in case.body or "response_format" in case.body:
        _check_structure(case, answer)
    return answer


def check_refusal(response: Response) -> None:
    """Raises WrongBodyError: a 503 must have OpenAI's shape and say when to come back."""
    after = response.headers.get("retry-after", "")
    if not after.isdigit() or int(after) < 1:
        raise WrongBodyError(f"503 with Retry-After {after!r}")
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        raise WrongBodyError(f"503 without an error body: {response.body[:200]!r}") from None
    if {"message", "type", "param", "code"} - set(error) or not error["message"]:
        raise WrongBodyError(f"503 with an incomplete error body: {error}")


def _plain(case: LoadCase, body: dict[str, Any]) -> dict[str, Any]:
    if not str(body["id"]) or body["model"] != case.body["model"] or type(body["created"]) is not int:
        raise ValueError("id, model or created is wrong")
    choices = []
    for index, choice in enumerate(body["choices"]):
        if choice["index"] != index:
            raise ValueError(f"choice {index} has the index {choice['index']}")
        message = choice.get("message")
        calls = (message or {}).get("tool_calls") or []
        choices.append({"text": choice["text"] if message is None else message["content"] or "",
                        "calls": [(call["function"]["name"], call["function"]["arguments"])
                                  for call in calls], "finish": choice["finish_reason"]})
    return {"choices": choices, "usage": _usage(body["usage"])}


def _streamed(case: LoadCase, response: Response) -> dict[str, Any]:
    if not response.events or response.events[-1][1] != b"[DONE]":
        raise ValueError("the stream doesn't end with [DONE]")
    choices: dict[int, dict[str, Any]] = {}
    ids, usage = set(), None
    for _, chunk in response.chunks():
        if "error" in chunk:
            raise ValueError(f"an error in the stream: {chunk['error']}")
        ids.add(chunk["id"])
        if chunk.get("usage"):
            usage = chunk["usage"]
        for piece in chunk["choices"]:
            choice = choices.setdefault(piece["index"], {"text": "", "calls": [], "finish": None})
            if choice["finish"] is not None:
                raise ValueError("a choice goes on after its finish_reason")
            choice["finish"] = piece["finish_reason"]
            if case.path == TEXT:
                choice["text"] += piece["text"]
                continue
            choice["text"] += piece["delta"].get("content") or ""
            for call in piece["delta"].get("tool_calls") or []:
                _add_call(choice["calls"], call)
    if len(ids) != 1 or usage is None:
        raise ValueError(f"{len(ids)} ids, usage {usage}")
    if any(choice["finish"] is None for choice in choices.values()):
        raise ValueError("a choice has no finish_reason")
    ordered = [choices[index] for index in range(len(choices))]
    for choice in ordered:
        choice["calls"] = [tuple(call) for call in choice["calls"]]
    return {"choices": ordered, "usage": _usage(usage)}


def _add_call(calls: list[list[str]], piece: Mapping[str, Any]) -> None:
    if piece["index"] == len(calls):
        calls.append([piece["function"]["name"], ""])
    calls[piece["index"]][1] += piece["function"].get("arguments") or ""


def _usage(usage: Mapping[str, Any]) -> tuple[int, int]:
    prompt, answer = usage["prompt_tokens"], usage["completion_tokens"]
    if usage["total_tokens"] != prompt + answer or min(prompt, answer) < 1:
        raise ValueError(f"usage {usage}")
    return prompt, answer


def _check_structure(case: LoadCase, answer: dict[str, Any]) -> None:
    for choice in answer["choices"]:
        if "tools" in case.body:
            if [name for name, _ in choice["calls"]] != ["weather"]:
                raise WrongBodyError(f"the calls are {choice['calls']}")
            raw, schema = choice["calls"][0][1], TOOL["function"]["parameters"]
        else:
            raw, schema = choice["text"], SCHEMA
        try:
            value = json.loads(raw)
        except ValueError:
            raise WrongBodyError(f"no JSON: {raw!r}, finish_reason {choice['finish']}") from None
        if set(value) != set(schema["properties"]):
            raise WrongBodyError(f"other keys than the schema's: {raw}")
        for name, rule in schema["properties"].items():
            kind = {"string": str, "integer": int}.get(rule.get("type", ""))
            if (kind and type(value[name]) is not kind) or value[name] not in rule.get("enum", [value[name]]):
                raise WrongBodyError(f"{name} is {value[name]!r}")


@dataclass
class Tally:
    """What came back so far. Times are in milliseconds."""

    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    late: Counter[str] = field(default_factory=Counter)
    health: list[float] = field(default_factory=list)
    rss: list[tuple[float, int]] = field(default_factory=list)

    def add(self, case: LoadCase, response: Response, expected: dict[str, Any]) -> None:
        took = 1e3 * (response.ended - response.sent)
        try:
            if response.status == 503:
                check_refusal(response)
                self.refused.append(took)
                if took > LATE:
                    self.late[case.kind] += 1
                self.answers["503"] += 1
            elif case.leave_after is not None:
                if response.error or response.status not in (0, 200):
                    raise WrongBodyError(f"status {response.status} {response.error}")
                self.answers[case.kind] += 1
            elif response.status != 200:
                reason = response.error or response.body[:300]
                raise WrongBodyError(f"status {response.status}: {reason!r}")
            else:
                if (answer := answer_of(case, response)) != expected:
                    raise WrongBodyError(f"{answer} but alone {expected}")
                self.answers[case.kind] += 1
        except WrongBodyError as error:
            self.wrong.append(f"{case.kind}: {error}")


async def alone(url: str, load: list[LoadCase]) -> list[tuple[LoadCase, dict[str, Any]]]:
    """Each request that the server takes, with its answer. Raises WrongBodyError, RuntimeError."""
    kept, refused = [], {}
    for case in load:
        if case.leave_after is not None:
            kept.append((case, {}))
            continue
        response = await send(url, case.path, case.body)
        if response.status == 400:
            refused[case.kind] = response.json()["error"]["message"]
        elif response.status != 200:
            raise RuntimeError(f"{case.kind} alone: status {response.status} {response.error}")
        else:
            kept.append((case, answer_of(case, response)))
    for kind, why in refused.items():
        print(f"left out: {kind}: {why}")
    return kept


async def capacity(url: str, known: list[tuple[LoadCase, dict[str, Any]]], clients: int,
                   seconds: float) -> float:
    """Requests a second that this many clients get answered, who send as fast as they are answered."""
    end, done = time.perf_counter() + seconds, 0

    async def client(number: int) -> None:
        nonlocal done
        random_ = random.Random(number)
        while time.perf_counter() < end:
            case, _ = random_.choice(known)
            response = await send(url, case.path, case.body, leave_after=case.leave_after)
            done += response.status != 503

    begin = time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(clients)))
    return done / (time.perf_counter() - begin)


async def overload(url: str, known: list[tuple[LoadCase, dict[str, Any]]], clients: int, rate: float,
                   seconds: float, tally: Tally) -> None:
    """Send ``rate`` requests a second in all. A client whose answer takes longer sends its next at once."""
    begin = time.perf_counter()
    process = server_process(url)
    turn = 0

    async def client(number: int) -> None:
        nonlocal turn
        random_ = random.Random(f"client {number}")
        while time.perf_counter() - begin < seconds:
            due, turn = begin + turn / rate, turn + 1
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            case, expected = random_.choice(known)
            response = await send(url, case.path, case.body, leave_after=case.leave_after)
            tally.add(case, response, expected)

    async def watch() -> None:
        while True:
            if process:
                tally.rss.append((time.perf_counter() - begin, resident(process)))
            response = await send(url, "/health", timeout=30)
            tally.health.append(1e3 * (response.ended - response.sent))
            if response.status != 200:
                tally.wrong.append(f"/health: {response.status} {response.error}")
            await asyncio.sleep(1)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(client(number) for number in range(clients)))
    watching.cancel()


async def left_over(url: str) -> dict[str, Any]:
    """What ``/ready`` says once nothing runs, or after ten seconds."""
    state: dict[str, Any] = {}
    for _ in range(40):
        state = (await send(url, "/ready")).json()
        if not state.get("running") and not state.get("waiting"):
            break
        await asyncio.sleep(0.25)
    return state


def growth(rss: list[tuple[float, int]], seconds: float) -> tuple[int, int, int]:
    """Bytes at the start, in the middle and at the end: medians of tenths of the time."""
    def at(first: float, last: float) -> int:
        return int(median(size for when, size in rss if first * seconds <= when <= last * seconds))

    return at(0, 0.1), at(0.35, 0.5), at(0.9, 10)


def run_overload(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """The report's content and the exit code."""
    url = args.url.rstrip("/")
    seconds = 60 * args.minutes
    tally = Tally()
    known = asyncio.run(alone(url, cases(model_of(url), args.seed)))
    able = asyncio.run(capacity(url, known, 8, min(20.0, seconds / 4)))
    print(f"capacity {able:.1f} requests a second; {args.clients} clients send {args.times * able:.1f} "
          f"for {seconds:.0f} s", flush=True)
    with Clock() as clock:
        asyncio.run(overload(url, known, args.clients, args.times * able, seconds, tally))
    state = asyncio.run(left_over(url))
    if state.get("running") or state.get("waiting"):
        tally.wrong.append(f"requests are left in the server: {state}")
    for case, expected in known:  # alone once more
        if case.leave_after is None:
            tally.add(case, asyncio.run(send(url, case.path, case.body)), expected)
    return report(tally, clock, able, seconds)


def report(tally: Tally, clock: Clock, able: float, seconds: float) -> tuple[dict[str, Any], int]:
    """Print the summary. Returns the report's content and the exit code."""
    total = sum(tally.answers.values()) + len(tally.wrong)
    print(f"{total} answers in {clock.wall:.0f} s ({total / clock.wall / able:.1f} times the capacity): "
          + ", ".join(f"{count} {kind}" for kind, count in tally.answers.most_common()))
    late = tally.late.total()
    if tally.refused:
        print(f"503 after {median(tally.refused):.1f} ms, p99 {quantile(tally.refused, 0.99):.1f}, longest "
              f"{max(tally.refused):.1f}; {late} of {len(tally.refused)} later than {LATE} ms"
              + "".join(f", {count} {kind}" for kind, count in tally.late.most_common(6)))
    print(f"/health after {median(tally.health):.1f} ms, longest {max(tally.health):.1f}; "
          f"client {100 * clock.cpu:.0f}% of a core")
    problems = [f"{late} refusals were late"] * (late > 0.01 * len(tally.refused))
    if tally.rss:
        start, middle, end = growth(tally.rss, seconds)
        print(f"memory: {start / 1e6:.0f} MB at the start, {middle / 1e6:.0f} MB in the middle, "
              f"{end / 1e6:.0f} MB at the end, at most {max(size for _, size in tally.rss) / 1e6:.0f} MB")
        if end > 1.05 * middle:
            problems.append(f"memory grew by {(end - middle) / 1e6:.0f} MB in the second half")
    for problem in tally.wrong[:10]:
        print(f"wrong: {problem[:600]}")
    print("; ".join([f"{len(tally.wrong)} wrong bodies", *problems]))
    return {"capacity": able, "answers": tally.answers, "wrong": tally.wrong, "refused_ms": tally.refused,
            "health_ms": tally.health, "rss": tally.rss}, 1 if tally.wrong or problems else 0
