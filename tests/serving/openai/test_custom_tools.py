"""Tools of ``/v1/responses`` that aren't plain functions: custom ones, and those of namespaces."""

import json

import pytest
from openai.types.responses import Response

from quantkit.serving.errors import ApiError
from quantkit.serving.models import ServedEngine
from quantkit.serving.openai.response_tools import InputText, input_text
from quantkit.structure.base import ToolCallDelta
from quantkit.structure.grammar import CompiledStructure

from ..conftest import events
from .test_responses import EVENT

PATH = "/v1/responses"
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files.",
         "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** " /.+/ "\\n"\n'}}
MCP = {"type": "namespace", "name": "mcp__git", "description": "d", "tools": [
    {"type": "function", "name": "log", "parameters": {"type": "object"}}, {**PATCH, "name": "edit"},
    {"type": "web_search"}]}
TEXT = '*** "a\\b"\n\U0001f600é'
CALLS = [[ToolCallDelta(0, id="call_a", name="apply_patch")],
         *([ToolCallDelta(0, letter)] for letter in json.dumps({"input": TEXT})),
         [ToolCallDelta(1, "{}", id="call_b", name="mcp__git__log")],
         [ToolCallDelta(2, '{"input": "x"}', id="call_c", name="mcp__git__edit")]]
ASKED = {"input": "the cat", "max_output_tokens": 100, "ignore": 1}


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """Structures that were to be compiled; none is."""
    seen = []
    monkeypatch.setattr(ServedEngine, "compile",
                        lambda self, structure: seen.append(structure) or CompiledStructure(lambda: None))
    return seen


def test_calls_are_what_the_client_gave(shared, scripted):
    scripted(CALLS)
    answer = shared.post(PATH, {**ASKED, "tools": [PATCH, MCP]})
    assert answer.status_code == 200, answer.text
    assert "tools[1].tools[2] (web_search)" in answer.headers["quantkit-ignored"]
    Response.model_validate(answer.json())
    patch, log, edit = answer.json()["output"]
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", TEXT)
    assert patch["call_id"] == "call_a" and "namespace" not in patch
    assert (log["type"], log["name"], log["namespace"]) == ("function_call", "log", "mcp__git")
    assert (edit["type"], edit["name"], edit["input"]) == ("custom_tool_call", "edit", "x")
    assert edit["namespace"] == "mcp__git"


def test_a_plain_text_is_streamed(shared, scripted):
    scripted(CALLS)
    sent = events(shared.post(PATH, {**ASKED, "tools": [PATCH, MCP], "stream": True}), EVENT)
    deltas = [event for event in sent if event["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(event["delta"] for event in deltas) == TEXT + "x" and len(deltas) > 5
    done = [event["input"] for event in sent if event["type"] == "response.custom_tool_call_input.done"]
    assert done == [TEXT, "x"]
    items = [event["item"] for event in sent if event["type"] == "response.output_item.done"]
    assert items == sent[-1]["response"]["output"] and items[0]["input"] == TEXT
    assert not [event for event in sent if event["type"].startswith("response.function_call")
                and event["output_index"] != 1]


def test_what_was_called_can_be_sent_back(shared, prepared):
    shared.post(PATH, {"max_output_tokens": 1, "tools": [], "input": [
        {"role": "user", "content": "go"},
        {"type": "additional_tools", "role": "developer", "tools": [PATCH, MCP]},
        {"type": "reasoning", "summary": [], "encrypted_content": "x", "content": None},
        {"type": "custom_tool_call", "call_id": "a", "name": "apply_patch", "input": TEXT,
         "status": "completed"},
        {"type": "function_call", "call_id": "b", "name": "log", "namespace": "mcp__git", "arguments": "{}"},
        {"type": "local_shell_call", "call_id": "c", "status": "completed",
         "action": {"type": "exec", "command": ["ls"]}},
        {"type": "web_search_call", "status": "completed"},
        {"type": "custom_tool_call_output", "call_id": "a", "output": "Done."},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "none"}]},
        {"type": "function_call_output", "call_id": "c", "output": "x"}]})
    messages, tools, _ = prepared[-1]
    assert [tool.name for tool in tools] == ["apply_patch", "mcp__git__log", "mcp__git__edit"]
    assert [call["function"] for call in messages[1]["tool_calls"]] == [
        {"name": "apply_patch", "arguments": {"input": TEXT}}, {"name": "mcp__git__log", "arguments": {}},
        {"name": "local_shell", "arguments": {"type": "exec", "command": ["ls"]}}]
    assert [message["content"] for message in messages[2:]] == ["Done.", "none", "x"]


def test_a_grammar_is_kept(shared, prepared, compiled):
    asked = {"input": "a", "max_output_tokens": 1, "tools": [PATCH]}
    answer = shared.post(PATH, {**asked, "tool_choice": {"type": "custom", "name": "apply_patch"}})
    assert answer.status_code == 200 and "quantkit-ignored" not in answer.headers
    (tool,) = compiled[0].tools
    assert compiled[0].tool_choice == "apply_patch" and tool.strict
    assert tool.parameters["properties"]["input"]["pattern"] == r"^(?:\*\*\* (?:.+)\n)$"
    assert 'start: "*** "' in prepared[-1][1][0].description  # the model is told of it


@pytest.mark.parametrize(("definition", "reason"), [
    ('start: "(" start ")" | "x"', "the grammar can't be kept: the rule start refers to itself"),
    ('start: "x"', "it takes too much work")])
def test_a_grammar_that_cant_be_kept_is_named(shared, strict, monkeypatch, definition, reason):
    def refuse(self, structure):
        raise ApiError(400, "it takes too much work")

    monkeypatch.setattr(ServedEngine, "compile", refuse)
    tool = {**PATCH, "format": {**PATCH["format"], "definition": definition}}
    asked = {"input": "a", "max_output_tokens": 1, "tools": [tool]}
    answer = shared.post(PATH, asked)
    assert answer.status_code == 200, answer.text
    assert answer.headers["quantkit-ignored"] == f"tools[0].format ({reason})"
    answer = strict.post(PATH, asked)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools[0].format"


@pytest.mark.parametrize(("arguments", "text"), [
    ('{"input": "a\\nb"}', "a\nb"), ('{ "input" : "" }', ""), ('{"patch": "x"}', "x"), ("{}", "{}"),
    ('{"other": 1, "input": "x"}', "x"), ('{"input": "a\\n', "a\n"), ('{"input": "a\\u00', "a"),
    ('{"input": "\\ud83d\\ude00"}', "\U0001f600"), ('{"input": "\\ud83dx"}', "\ufffdx"),
    ('{"input": "\\ud83d\\n"}', "\ufffd\n"), ('{"input": "\\ude00"}', "\ufffd"),
    ('{"input": 5}', '{"input": 5}'),
    ('{"inp', '{"inp'), ("", ""),
])
def test_the_text_of_arguments(arguments, text):
    assert input_text(arguments) == text
    whole = InputText()
    parts = [whole.push(letter) for letter in arguments]
    assert "".join([*parts, whole.finish()]) == whole.text == text
