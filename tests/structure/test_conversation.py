"""What a chat template is given: values instead of text, ids and calls as it wants them, or plain text."""

from __future__ import annotations

import json

import pytest

from quantkit.structure.conversation import conversation, tool_message
from quantkit.structure.turns import NAMES, Tool, TurnFormat, parser

CALLS = [{"id": f"call_{number}", "type": "function", "function": {
    "name": "get_weather", "arguments": json.dumps({"city": city})}} for number, city in
    enumerate(("Paris", "Rome"))]
MESSAGES = [{"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": None, "tool_calls": CALLS},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
            {"role": "tool", "tool_call_id": "call_0", "content": "sun"},
            {"role": "user", "content": "Thanks"}]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_given_is_changed_in_place_and_contents_are_text(name, tools):
    before = json.dumps(MESSAGES)
    messages, _ = conversation(TurnFormat(name), MESSAGES, tools)
    assert json.dumps(MESSAGES) == before
    assert all(isinstance(message["content"], str) for message in messages)
    for message in messages:
        for call in message.get("tool_calls", []):
            assert call["function"]["arguments"]["city"] in ("Paris", "Rome")


def test_templates_get_tools_as_openai_writes_them(tools):
    _, given = conversation(TurnFormat("hermes"), MESSAGES, tools)
    assert [tool["function"]["name"] for tool in given] == ["get_weather", "time"]
    assert conversation(TurnFormat("hermes"), MESSAGES, [])[1] is None
    assert tool_message(Tool("f"))["function"]["parameters"] == {"type": "object", "properties": {}}


def test_llama_3_gets_one_call_a_message_each_before_its_result(tools):
    messages, _ = conversation(TurnFormat("llama3"), MESSAGES, tools)
    assert [(message["role"], [call["id"] for call in message.get("tool_calls", [])] or message["content"])
            for message in messages] == [
        ("user", "Weather?"), ("assistant", ["call_0"]), ("tool", "sun"), ("assistant", ["call_1"]),
        ("tool", "rain"), ("user", "Thanks")]


def test_mistral_gets_ids_of_nine_characters_that_still_match(tools):
    messages, _ = conversation(TurnFormat("mistral"), MESSAGES, tools)
    ids = [call["id"] for call in messages[1]["tool_calls"]]
    assert [messages[3]["tool_call_id"], messages[2]["tool_call_id"]] == ids
    assert all(len(text) == 9 and text.isalnum() for text in ids) and len(set(ids)) == 2
    kept = [{"role": "tool", "tool_call_id": "aB3456789", "content": ""}]
    assert conversation(TurnFormat("mistral"), kept, [])[0][0]["tool_call_id"] == "aB3456789"


def test_a_model_without_tools_in_its_template_is_told_and_shown(tools):
    messages, given = conversation(TurnFormat("json"), [{"role": "system", "content": "Be kind."}, *MESSAGES],
                                   tools)
    assert given is None and [message["role"] for message in messages] == [
        "system", "user", "assistant", "user"]
    assert messages[0]["content"].startswith("Be kind.\n\n") and "get_weather" in messages[0]["content"]
    assert "Result of get_weather:\nrain" in messages[3]["content"] and "sun" in messages[3]["content"]
    assert messages[3]["content"].endswith("\n\nThanks")
    turn = parser(TurnFormat("json"), tools)  # what it is shown is what the parser reads
    deltas = turn.push(messages[2]["content"]) + turn.finish()
    assert [delta.name for delta in deltas if delta.name] == ["get_weather"] * 2
    assert all(set(message) == {"role", "content"} for message in messages)


def test_where_no_system_message_is_possible_the_first_question_has_it(tools):
    messages, _ = conversation(TurnFormat("json", variant="user"), MESSAGES, tools)
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert "get_weather" in messages[0]["content"] and messages[0]["content"].endswith("\n\nWeather?")


@pytest.mark.parametrize("arguments", ["{", "[1]", "3", "[" * 100_000])
def test_arguments_that_are_no_object_stay_as_they_were_written(arguments):
    call = {"id": "a", "function": {"name": "f", "arguments": arguments}}
    messages, _ = conversation(TurnFormat("hermes"), [{"role": "assistant", "tool_calls": [call]}], [])
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == arguments
