"""Answers that must look like something do, in all three APIs, whatever a random model would write."""

import json
import re

import pytest

pytest.importorskip("llguidance", reason="structured output needs the extra 'structure'")

from ..conftest import CHAT, MESSAGES, RESPONSES, asked, called

USER = [{"role": "user", "content": "the cat"}]
SCHEMA = {"type": "object", "properties": {"place": {"enum": ["here", "there"]}, "loud": {"type": "boolean"}},
          "required": ["place", "loud"], "additionalProperties": False}
NAMED = {"name": "look", "description": "Look.", "parameters": SCHEMA}


def chat(shared, **body):
    answer = shared.post(CHAT, {"messages": USER, "max_tokens": 4000, "seed": 3, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def ended(answer):
    return answer["choices"][0]["finish_reason"] if "choices" in answer else (
        answer.get("stop_reason") or answer["status"])


def right(arguments):
    value = json.loads(arguments)
    return value["place"] in ("here", "there") and isinstance(value["loud"], bool) and len(value) == 2


@pytest.mark.parametrize(("path", "body"), [
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}),
    (CHAT, {"structured_outputs": {"json": SCHEMA}}), (CHAT, {"guided_json": SCHEMA}),
    (CHAT, {"guided_json": json.dumps(SCHEMA)}),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}})])
def test_json_by_a_schema(shared, path, body):
    answer = shared.post(path, {**asked(path, most=4000), **body}).json()
    calls, text = called(path, answer)
    assert right(text) and not calls and ended(answer) in ("stop", "completed", "end_turn")


ONE = {"parallel_tool_calls": False}


@pytest.mark.parametrize(("path", "body"), [
    *((CHAT, {"tools": [{"type": "function", "function": NAMED}], "tool_choice": choice, **ONE})
      for choice in ("required", {"type": "function", "function": {"name": "look"}})),
    (RESPONSES, {"tools": [{"type": "function", **NAMED}], "tool_choice": "required", **ONE}),
    (MESSAGES, {"tools": [{"name": "look", "input_schema": SCHEMA}],
                "tool_choice": {"type": "any", "disable_parallel_tool_use": True}})])
def test_a_call_that_must_be(shared, path, body):
    answer = shared.post(path, {**asked(path, most=4000), **body}).json()
    ((name, arguments),), text = called(path, answer)
    assert name == "look" and right(arguments) and not text
    assert ended(answer) in ("tool_calls", "completed", "tool_use")


@pytest.mark.parametrize(("body", "allowed"), [
    ({"guided_choice": ["yes", "no"]}, ("yes", "no")),
    ({"structured_outputs": {"regex": "(ab){3}"}}, ("ababab",)),
    ({"guided_grammar": 'start: "x" | "y"'}, ("x", "y"))])
def test_other_structures_in_chat_and_completions(shared, body, allowed):
    assert chat(shared, **body)["message"]["content"] in allowed
    text = shared.post("/v1/completions", {"prompt": "a", "max_tokens": 50, **body}).json()["choices"][0]
    assert text["text"] in allowed and text["finish_reason"] == "stop"


def test_tools_beside_a_structure(shared):
    """A call that must be, is one; a turn that may be a call has the structure if it is none."""
    body = {"tools": [{"type": "function", "function": NAMED}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
    (call,) = chat(shared, **body, tool_choice="required", parallel_tool_calls=False)["message"]["tool_calls"]
    assert right(call["function"]["arguments"])
    answer = chat(shared, **body, parallel_tool_calls=False)
    if answer["finish_reason"] == "tool_calls":
        assert right(answer["message"]["tool_calls"][0]["function"]["arguments"])
    else:
        assert right(answer["message"]["content"]) and answer["finish_reason"] == "stop"


def test_choices_of_one_request_each_have_their_own(shared):
    answer = shared.post(CHAT, {"messages": USER, "max_tokens": 4000, "n": 4, "seed": 1,
                                                  "guided_json": SCHEMA})
    assert all(right(choice["message"]["content"]) for choice in answer.json()["choices"])


ODD = {"type": "object", "properties": {"to": {"type": "string", "format": "date", "pattern": "(?=a)"},
                                        "tags": {"type": "array", "maxItems": 1, "uniqueItems": True,
                                                 "items": {"const": 1}}}, "required": ["to"]}
PATHS = ("$.properties.to.pattern", "$.properties.tags.uniqueItems")


def odd(strict):
    """Requests whose schema can't be kept as a whole, by their paths: for an answer, and for a call."""
    named = {"name": "look", "strict": strict}
    text = {"type": "json_schema", "name": "x", "schema": ODD, "strict": strict}
    return {
        "chat": (CHAT, {"messages": USER, "max_tokens": 3, "response_format": {
            "type": "json_schema", "json_schema": {"name": "x", "schema": ODD, "strict": strict}}}),
        "chat tool": (CHAT, {"messages": USER, "max_tokens": 3, "tool_choice": "required", "tools": [
            {"type": "function", "function": {**named, "parameters": ODD}}]}),
        "response": (RESPONSES, {"input": "the cat", "max_output_tokens": 3, "text": {"format": text}}),
        "response tool": (RESPONSES, {"input": "the cat", "max_output_tokens": 3, "tool_choice": "required",
                                      "tools": [{"type": "function", **named, "parameters": ODD}]}),
        "message tool": (MESSAGES, {"messages": USER, "max_tokens": 3, "tool_choice": {"type": "any"},
                                          "tools": [{**named, "input_schema": ODD}]})}


@pytest.mark.parametrize("kind", odd(False))
@pytest.mark.parametrize("stream", [False, True])
def test_what_cant_be_kept_is_left_out_and_named(shared, kind, stream):
    path, body = odd(False)[kind]
    answer = shared.post(path, {**body, "stream": stream})
    place = "tools.look" if "tool" in kind else "schema"
    assert answer.status_code == 200, answer.text
    assert all(f"{place}: {path}" in answer.headers["quantkit-ignored"] for path in PATHS)


@pytest.mark.parametrize("kind", odd(True))
def test_strict_schemas_are_refused_with_the_places_that_cant_be_kept(shared, kind):
    path, body = odd(True)[kind]
    answer = shared.post(path, body)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and all(f"{path}: " in message for path in PATHS)
    assert ("the schema of look" if "tool" in kind else "the JSON schema") in message


@pytest.mark.parametrize(("path", "body"), [
    (CHAT, {"messages": USER, "guided_json": ODD}),
    (MESSAGES, {"messages": USER, "max_tokens": 3, "output_config": {"format": {
        "type": "json_schema", "schema": ODD}}})])
def test_schemas_that_have_no_strict_are_strict(shared, path, body):
    answer = shared.post(path, body)
    assert answer.status_code == 400 and PATHS[0] in answer.json()["error"]["message"]


@pytest.mark.parametrize("function", [{}, {"parameters": None}, {"parameters": {}},
                                      {"parameters": {"type": "object"}}])
def test_a_tool_without_parameters_is_called_with_an_empty_object(shared, function):
    answer = chat(shared, tools=[{"type": "function", "function": {"name": "now", **function}}],
                  tool_choice="required", parallel_tool_calls=False)
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "now" and json.loads(call["function"]["arguments"]) == {}


@pytest.mark.parametrize("body", [{"guided_regex": "(?=a)b"}, {"guided_grammar": "start: nothing_like_it"},
                                  {"guided_json": {"type": "nothing"}}])
def test_what_cant_be_compiled_is_refused(shared, body):
    answer = shared.post(CHAT, {"messages": USER, "max_tokens": 5, **body})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_structure", answer.text
    assert shared.errors == []


def test_a_custom_tools_input_is_of_its_grammar(shared):
    for syntax, definition in (("lark", 'start: "a\\"\\n" /[0-9]/ b?\nb: "\\\\"'),
                               ("regex", 'a"\\n[0-9]\\\\?')):
        tool = {"type": "custom", "name": "edit", "format": {
            "type": "grammar", "syntax": syntax, "definition": definition}}
        answer = shared.post(RESPONSES, {
            "input": "a", "max_output_tokens": 200, "tools": [tool],
            "tool_choice": {"type": "custom", "name": "edit"}})
        assert answer.status_code == 200 and "quantkit-ignored" not in answer.headers, answer.headers
        (call,) = answer.json()["output"]
        assert call["type"] == "custom_tool_call" and re.fullmatch(r'a"\n[0-9]\\?', call["input"])
