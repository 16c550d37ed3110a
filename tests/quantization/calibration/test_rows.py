"""Rows in every form that data sets come in, and what is wrong with those that are in none."""

import json

import pytest

from quantkit.quantization.calibration.rows import parse_row
from quantkit.support.errors import CalibrationError

ASKED, ANSWERED = {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Ho."}
CHAT = [ASKED, ANSWERED]


def parse(row: object):
    return parse_row(json.dumps(row).encode(), "chats.jsonl line 3")


@pytest.mark.parametrize("row", [
    {"messages": CHAT, "source": "x"},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "H"},
                                               {"type": "text", "text": "i?"}]}, ANSWERED]},
    {"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Ho."}]},
    {"conversations": CHAT},
    {"conversation": CHAT},
    {"messages": [{"from": "user", "value": "Hi?"}, {"from": "assistant", "value": "Ho."}]},
    {"prompt": "Hi?", "response": "Ho."},
    {"prompt": "Hi?", "completion": "Ho."},
    {"prompt": [ASKED], "completion": [ANSWERED]},
    {"prompt": [ASKED], "response": "Ho."},
    {"instruction": "Hi?", "input": "", "output": "Ho."},
    {"instruction": "Hi?", "context": None, "response": "Ho.", "category": "x"},
    {"question": "Hi?", "answer": "Ho."},
])
def test_every_form_of_a_conversation(row):
    chats = parse(row)
    assert chats.is_chat and list(chats.content) == CHAT and chats.where == "chats.jsonl line 3"


def test_a_system_turn_stays_and_an_input_goes_below_its_instruction():
    system = {"role": "system", "content": "Be brief."}
    assert parse({"messages": [system, *CHAT]}).content[0] == system
    added = parse({"instruction": "Add.", "input": "1, 2", "output": "3"})
    assert added.content[0]["content"] == "Add.\n\n1, 2"
    assert list(parse({"prompt": "Hi?"}).content) == [ASKED]


CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bergen"}'}}
RESULT = {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "7 degrees"}
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_calls_and_their_results_stay(content):
    called = {"role": "assistant", "tool_calls": [CALL]}
    chats = parse({"messages": [ASKED, called | content, RESULT | {"extra": 1}, ANSWERED]})
    assert list(chats.content) == [ASKED, called | {"content": ""}, RESULT, ANSWERED] and chats.tools == ()
    thought = ANSWERED | {"reasoning_content": "Hm."}
    assert parse({"messages": [ASKED | {"name": "Ann"}, thought]}).content == (ASKED, thought)


@pytest.mark.parametrize("tools", [[WEATHER], [{"type": "function", "function": WEATHER}],
                                   json.dumps([WEATHER])])
def test_tools_in_every_form(tools):
    assert parse({"messages": CHAT, "tools": tools}).tools == (WEATHER,)
    assert parse({"messages": CHAT, "tools": None}).tools == ()
    assert parse({"messages": CHAT, "tools": ""}).tools == ()


def test_plain_text():
    assert parse({"text": "Once.", "id": 1}).content == "Once." and not parse({"text": "Once."}).is_chat
    assert parse({"text": " \n"}) is None
    written = {"prompt": "Write about cats.", "text": "Cats sleep."}
    assert parse(written).content == "Cats sleep." and parse(written | {"completion": "Meow."}).is_chat


@pytest.mark.parametrize(("row", "said"), [
    ({"title": "x", "body": "y"}, "of no known form"),
    ({}, "of no known form"),
    ([{"text": "x"}], "is a JSON array"),
    ("x", "is a str"),
    (3, "is a int"),
    ({"text": 3}, "'text' is not text but a int"),
    ({"text": None}, "'text' is not text but a NoneType"),
    ({"text": "\ud800"}, "holds half a character"),
    ({"messages": []}, "without a user's turn"),
    ({"messages": [ANSWERED]}, "without a user's turn"),
    ({"messages": [{"role": "user", "content": " "}]}, "without a user's turn"),
    ({"messages": "Hi?"}, "not a list of turns"),
    ({"messages": ["Hi?"]}, "turn 1 of 'messages' has no"),
    ({"messages": [ASKED, {"role": "assistant"}]}, "turn 2 of 'messages' has no"),
    ({"messages": [ASKED, {"role": "", "content": "b"}]}, "turn 2 of 'messages': 'role' is not the name"),
    ({"messages": [ASKED, {"role": [], "content": "b"}]}, "turn 2 of 'messages': 'role' is not the name"),
    ({"messages": [ASKED, {"role": [{"type": "text", "text": "user"}], "content": "b"}]}, "not the name of"),
    ({"messages": [ASKED, {"role": "x", "content": None}]}, "turn 2 of 'messages': 'content' is not text"),
    ({"prompt": "Hi?", "response": ["x"]}, "'response' is not text"),
    ({"messages": None}, "of no known form"),
    ({"messages": [ASKED, {"role": "assistant", "content": None}]}, "turn 2 of 'messages': 'content' is not"),
    ({"messages": [ASKED, {"role": "assistant", "tool_calls": [{"name": "x"}]}]}, "not a list of calls"),
    ({"messages": [ASKED, {"role": "assistant", "tool_calls": "x"}]}, "not a list of calls"),
    ({"messages": CHAT, "tools": [{"name": 3}]}, "'tools' is not a list of functions"),
    ({"messages": CHAT, "tools": "{"}, "'tools' is not a list of functions"),
])
def test_what_is_wrong_with_a_row(row, said):
    with pytest.raises(CalibrationError, match=said) as caught:
        parse(row)
    assert "chats.jsonl line 3" in caught.value.what and caught.value.next


@pytest.mark.parametrize(("line", "said"), [
    (b'{"text": "x"', "is not JSON"), (b"once upon", "is not JSON"), (b"[" * 100_000, "is not JSON"),
    (b'{"text": "caf\xe9"}', "is not UTF-8")])
def test_a_broken_line_is_named(line, said):
    with pytest.raises(CalibrationError, match=said) as caught:
        parse_row(line, "chats.jsonl line 3")
    assert "chats.jsonl line 3" in caught.value.what and caught.value.next
