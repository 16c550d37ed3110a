"""The requests of ``overload.py`` and the checks of every body that comes back."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prompts import SHORT, text
from stream_client import Response

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
