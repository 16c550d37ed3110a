"""Messages that are calls as plain JSON, in all three APIs, whole and streamed."""

from __future__ import annotations

import pytest

from quantkit.structure.turns import TurnFormat, parser

from .conftest import CHAT, MESSAGES, RESPONSES, asked, called

CALL = '{"name": "look", "arguments": {"place": "here"}}'
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
LOOK = {"name": "look", "parameters": SCHEMA}
TOOLS = {CHAT: {"type": "function", "function": LOOK}, RESPONSES: {"type": "function", **LOOK},
         MESSAGES: {"name": "look", "input_schema": SCHEMA}}
BODIES = {path: {**asked(path, most=40), "tools": [tool]} for path, tool in TOOLS.items()}


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
    body = BODIES[CHAT]
    for text, more in ((f"Sure: {CALL}", {}), (CALL, {"tool_choice": "none"}), (CALL, {"tools": []}),
                       (CALL, {"tools": [tools[1]]}), (CALL.replace('"here"', "3"), {})):
        written(text)
        answer = shared.post(CHAT, {**body, **more}).json()
        assert called(CHAT, answer) == ([], text)


def test_json_that_was_asked_for_is_an_answer(shared, written):
    pytest.importorskip("llguidance", reason="structured output needs the extra 'structure'")
    written(CALL)
    body = {**BODIES[CHAT], "response_format": {"type": "json_object"}}
    assert called(CHAT, shared.post(CHAT, body).json()) == ([], CALL)


def test_a_server_that_reads_no_calls_from_plain_json(live, written):
    written(CALL)
    answer = live(bare_json_calls=False).post(CHAT, BODIES[CHAT]).json()
    assert called(CHAT, answer) == ([], CALL)
