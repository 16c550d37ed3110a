"""Whole messages that are calls as plain JSON, in the formats that write calls otherwise."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.structure.formats import bare_calls as checked
from quantkit.structure.formats.bare_calls import fit
from quantkit.structure.formats.scanner import MAX_HEAD
from quantkit.structure.turns import THINK, Tool, TurnFormat, parser

NAMES = ("hermes", "mistral", "gemma")
PARIS, TIME = ("get_weather", {"city": "Paris"}), ("time", {})
ONE, TWO = '{"name": "get_weather", "arguments": {"city": "Paris"}}', '{"name": "time", "parameters": {}}'

CALLS = [
    (ONE, [PARIS]), (TWO, [TIME]), (f"\n {ONE} \n", [PARIS]), (f"```json\n{ONE}\n```", [PARIS]),
    (f"```\n{ONE}\n```\n", [PARIS]), (f"```json {ONE}```", [PARIS]), (f"```json\n{ONE}", [PARIS]),
    (f"[{ONE}]", [PARIS]), (f"[\n {ONE},\n {TWO}\n]", [PARIS, TIME]), (f"```json\n[{TWO}, {ONE}]\n```",
                                                                     [TIME, PARIS]),
    ('{"name": "get_weather", "input": {"city": "Paris", "days": 2}}', [("get_weather", {"city": "Paris",
                                                                                         "days": 2})]),
    ('{"arguments": {"city": "Paris"}, "name": "get_weather"}', [PARIS]),
    ('{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}', [PARIS]),
    (f'{{"type": "function", "function": {ONE}}}', [PARIS]), (f'{{"function": {TWO}}}', [TIME]),
    (f'{{"id": "call_1", "type": "function", "function": {ONE}}}', [PARIS]),
    ('{"type": "tool_use", "id": "a", "name": "time", "input": {}}', [TIME]),
    ('{"name": "get_weather", "arguments": {"city": "a\\"}]` \\\\ é"}}', [("get_weather",
                                                                       {"city": 'a"}]` \\ é'})]),
]
TEXTS = [
    "", " ", "Hello.", f"Sure: {ONE}", f"{ONE}\nDone.", f"{ONE}{ONE}", f"{ONE}, {TWO}", f"{ONE} ```",
    f"```json\n{ONE}\n``` ok", f"```python\n{ONE}\n```", f"```json\n{ONE}\n``", f"[{ONE}", f"[{ONE},]",
    "[]", "[1]", f"[{ONE} {TWO}]", f"[[{ONE}]]", "{}", ONE[:-1],
    '{"name": "time"}', '{"name": "unknown", "arguments": {}}',
    '{"name": "get_weather", "arguments": {}}', '{"name": "get_weather", "arguments": {"city": 3}}',
    '{"name": "time", "arguments": {"zone": "CET"}}', '{"name": "time", "arguments": [1]}',
    '{"name": "time", "arguments": "no"}', '{"name": "time", "arguments": {}, "input": {}}',
    '{"name": "time", "arguments": {}, "city": "Paris"}', '{"city": "Paris"}', '{"name": 3, "arguments": {}}',
    '{"type": "object", "name": "time", "arguments": {}}', '{"function": "time", "arguments": {}}',
    f'{{"function": {ONE}, "name": "time"}}', f'[{ONE}, {{"name": "unknown", "arguments": {{}}}}]',
    '{"name": "time", "arguments": {"a": NaN}}', "``` ", "[", "{", "`", '{"name": "ti',
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("text", "calls"), CALLS)
def test_a_message_that_is_nothing_but_calls(read, name, text, calls):
    turn = read(name, text, range(len(text)), bare=True)
    assert turn.parsed == calls and not turn.text
    assert read(name, text, bare=False).text == text, "only where it is asked for"
    assert read(name, text, given=[], bare=True).text == text, "only where there are tools"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", TEXTS)
def test_all_other_messages_are_text(read, name, text):
    turn = read(name, text, range(len(text)), bare=True)
    assert not turn.calls and turn.text == text


@pytest.mark.parametrize("name", NAMES)
def test_behind_reasoning(read, name):
    turn = read(name, f"<think>\n{TWO}\n</think>\n\n{ONE}", bare=True, reasoning=THINK)
    assert turn.reasoning == TWO and turn.parsed == [PARIS] and not turn.text


def test_a_marked_call_is_the_call(read):
    turn = read("hermes", f"<tool_call>{ONE}</tool_call>", bare=True)
    assert turn.parsed == [PARIS]
    turn = read("hermes", f"{TWO}\n<tool_call>{ONE}</tool_call>", bare=True)
    assert turn.parsed == [PARIS] and turn.text.strip() == TWO


@pytest.mark.parametrize(("text", "held"), [
    ("Hello", ""), (" x", ""), ("{", "{"), ('{"name": "ti', '{"name": "ti'), ('{"name": "tiny"', ""),
    ('{"city"', ""), ('{"name": "time", "arguments": {"any', '{"name": "time", "arguments": {"any'),
    ("[1", ""), ("[{", "[{"), ("``x", ""), ("```js", "```js"), ("```py", ""), (f"{ONE}\n", ONE),
    (f"{ONE}x", "")])
def test_text_comes_as_soon_as_it_cannot_be_a_call(tools, text, held):
    turn = parser(TurnFormat("hermes"), tools, False, True)
    shown = "".join(delta.text for delta in turn.push(text))
    assert shown == ("" if held else text)


def test_what_is_held_is_bounded(tools):
    turn = parser(TurnFormat("hermes"), tools, False, True)
    begun = '{"name": "time", "arguments": {"a": "'
    assert turn.push(begun + "x" * (MAX_HEAD - len(begun))) == []
    (delta,) = turn.push("x")
    assert len(delta.text) == MAX_HEAD + 1 and turn.push("y")[0].text == "y"


PIECES = st.one_of(st.sampled_from([
    ONE, TWO, ONE[:20], ONE[20:], "[", "]", "{", "}", ",", " ", "\n", "```", "```json", "`", '"name": "time"',
    '"arguments": {}', ", ", '{"function": ', "<tool_call>", "</tool_call>", "<think>", "</think>", "a", "{}",
    "[TOOL_CALLS]"]), st.text(max_size=2))


@settings(max_examples=300)
@given(st.data())
def test_how_a_message_is_cut_makes_no_difference(read, data):
    text = "".join(data.draw(st.lists(PIECES, max_size=8)))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    reasoning = data.draw(st.sampled_from([None, THINK]))
    for name in NAMES:
        options = {"reasoning": reasoning, "bare": True}
        together = read(name, text, **options)
        assert together == read(name, text, cuts, **options) == read(name, text, range(len(text)), **options)
        plain = read(name, text, reasoning=reasoning)
        # a call, or as if nobody looked for calls
        assert together == plain or (together.calls and not together.text and not plain.calls)


OBJECT = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}},
          "additionalProperties": False}
SLOW = {"pattern": "(a+)+$"}


@pytest.mark.parametrize(("schema", "good", "bad"), [
    (OBJECT, [{"a": 3}, {}], [{"a": 2}, {"b": 1}, {"a": "3"}]),
    ({"$ref": "#/$defs/o", "$defs": {"o": OBJECT}}, [{"a": 3}], [{"a": 2}]),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "$id": "https://example.org/s", **OBJECT},
     [{"a": 3}], [{"a": 2}]),
    ({"anyOf": [OBJECT, {"required": ["x"]}]}, [{"a": 3}, {"a": 2, "x": 1}], [{"a": 2}]),
    ({"properties": {"l": {"uniqueItems": True}}}, [{"l": [1, "1", {}]}, {"l": 3}],
     [{"l": [{"x": 1}, {"x": 1}]}]),
    ({"properties": {"pattern": {"const": 1}, "$id": {"const": 2}}}, [{"pattern": 1}], [{"pattern": 2},
                                                                                     {"$id": 3}]),
    ({"patternProperties": {"(a+)+$": {}}, "additionalProperties": False}, [{"a" * 40 + "b": 1}], []),
    ({"properties": {"s": {"type": "string", "format": "date", **SLOW}}}, [{"s": "a" * 40 + "b"}],
     [{"s": 1}]),
    ({"properties": {"s": {"$schema": "http://json-schema.org/draft-07/schema#", **SLOW}}},
     [{"s": "a" * 40 + "b"}], []),
    ({"type": "strnig"}, [], [{}]), ({"$ref": "http://127.0.0.1:9/x"}, [], [{}]), ({"$ref": "#/x"}, [], [{}]),
    ({"$ref": "#"}, [], [{}]),
    ({"$ref": "#/$defs/d0", "$defs": {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2}
                                      for n in range(40)} | {"d40": {}}}, [], [{}]),
    ({"properties": {"l": {"uniqueItems": True}}}, [{"l": [[n] for n in range(9000)]}], [])])
def test_arguments_that_fit_a_schema(schema, good, bad):
    assert all(fit([(value, schema)]) for value in good) and not any(fit([(value, schema)]) for value in bad)


def test_checking_has_a_bound(monkeypatch):
    calls = [({"a": 1}, {"properties": {"a": {"type": "integer"}}})] * 3
    assert fit(calls)
    clock = itertools.count(0, checked.MAX_SECONDS / 4)  # each look at the clock takes a quarter of the time
    monkeypatch.setattr(checked.time, "thread_time", lambda: next(clock))
    assert fit(calls[:1]) and not fit(calls), "it is the time of all calls together"


def test_a_rule_that_compares_large_values_again_and_again_is_given_up():
    numbers = list(range(4000))
    schema = {"$defs": {"other": {"enum": [{"b": [*numbers, 1]}]}},
              "properties": {"a": {"anyOf": [{"$ref": "#/$defs/other"}] * 3000 + [{}]}}}
    assert not fit([({"a": {"b": [*numbers, 2]}}, schema)])  # all of it would take seconds


def test_a_message_of_many_calls_is_text_if_checking_them_takes_too_long():
    tool = Tool("time", "", {"type": "object", "allOf": [{"type": "object"}] * 400})
    turn = parser(TurnFormat("hermes"), [tool], False, True)
    text = f"[{','.join([TWO] * 1000)}]"
    deltas = [*turn.push(text), *turn.finish()]
    assert [delta.text for delta in deltas] == [text]


def test_arguments_are_json_whatever_is_in_them(read):
    turn = read("mistral", '{"name": "get_weather", "arguments": {"city": "\\ud800 é"}}', bare=True)
    assert json.loads(turn.calls[0][1]) == {"city": "\ud800 é"} and turn.calls[0][1].isascii()
