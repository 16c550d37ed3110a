"""Messages that are calls as plain JSON, in all three APIs, whole and streamed."""

from __future__ import annotations

import json

import pytest

from quantkit.structure.turns import TurnFormat, parser

USER = [{"role": "user", "content": "the cat"}]
CALL = '{"name": "look", "arguments": {"place": "here"}}'
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
OPENAI = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
BODIES = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 40, "tools": [OPENAI]},
    "/v1/responses": {"input": "the cat", "max_output_tokens": 40, "tools": [
        {"type": "function", **OPENAI["function"]}]},
    "/v1/messages": {"messages": USER, "max_tokens": 40, "tools": [{"name": "look", "input_schema": SCHEMA}]}}


class Written:
    """A parser that is given a text of ours, whatever the model writes."""

    def __init__(self, inner, text):
        self._inner, self._left = inner, list(text)

    def push(self, text):
        return self._inner.push(self._left.pop(0)) if self._left else []

    def finish(self):
        return self._inner.push("".join(self._left)) + self._inner.finish()


@pytest.fixture
def written(monkeypatch):
    """``written(text)``: every turn of a model that writes calls between tags is this text."""

    def write(text):
        monkeypatch.setattr("quantkit.serving.turns.parser", lambda _, *options: Written(
            parser(TurnFormat("hermes"), *options), text))

    return write


def called(path, answer):
    """Names and arguments of the calls of a whole answer, and its text."""
    if path == "/v1/responses":
        calls = [(item["name"], item["arguments"]) for item in answer["output"]
                 if item["type"] == "function_call"]
        text = "".join(part["text"] for item in answer["output"] for part in item.get("content") or [])
    elif path == "/v1/messages":
        calls = [(part["name"], json.dumps(part["input"])) for part in answer["content"]
                 if part["type"] == "tool_use"]
        text = "".join(part.get("text", "") for part in answer["content"])
    else:
        message = answer["choices"][0]["message"]
        calls = [(call["function"]["name"], call["function"]["arguments"])
                 for call in message.get("tool_calls", [])]
        text = message["content"] or ""
    return calls, text


@pytest.mark.parametrize("path", BODIES)
def test_a_call_in_each_api(shared, written, path):
    written(f"```json\n{CALL}\n```")
    answer = shared.post(path, BODIES[path]).json()
    assert called(path, answer) == ([("look", '{"place": "here"}')], "")


@pytest.mark.parametrize("path", BODIES)
def test_the_same_streamed(shared, written, path):
    written(CALL)
    events = shared.post(path, {**BODIES[path], "stream": True}).text
    assert '\\"place\\": \\"here\\"' in events and '"look"' in events
    assert '{\\"name\\"' not in events, "none of it came as text"


def test_what_isnt_a_call_is_text(shared, written, tools):
    body = BODIES["/v1/chat/completions"]
    for text, more in ((f"Sure: {CALL}", {}), (CALL, {"tool_choice": "none"}), (CALL, {"tools": []}),
                       (CALL, {"tools": [tools[1]]}), (CALL.replace('"here"', "3"), {})):
        written(text)
        answer = shared.post("/v1/chat/completions", {**body, **more}).json()
        assert called("/v1/chat/completions", answer) == ([], text)


def test_json_that_was_asked_for_is_an_answer(shared, written):
    pytest.importorskip("llguidance", reason="structured output needs the extra 'structure'")
    written(CALL)
    body = {**BODIES["/v1/chat/completions"], "response_format": {"type": "json_object"}}
    assert called("/v1/chat/completions", shared.post("/v1/chat/completions", body).json()) == ([], CALL)


def test_a_server_that_reads_no_calls_from_plain_json(live, written):
    written(CALL)
    answer = live(bare_json_calls=False).post("/v1/chat/completions", BODIES["/v1/chat/completions"]).json()
    assert called("/v1/chat/completions", answer) == ([], CALL)
