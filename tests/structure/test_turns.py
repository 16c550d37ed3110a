"""Every family's calls, cut anywhere; what is malformed stays text; reasoning and text in their order."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.structure.base import PlainTurn
from quantkit.structure.turns import THINK, Tool, TurnFormat, opens_reasoning, parser
from quantkit.support.errors import UsageError

PARIS, PARIS_JSON = ("get_weather", {"city": "Paris"}), '{"city": "Paris"}'
ONE = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
TWO = '{"name": "time", "arguments": {}}'
LLAMA = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
NASTY = '{"city": "a\\"}\\\\ <tool_call> [ARGS] \\u00e9 }{", "x": [{"y": -1.5e3}, null, true]}'
GEMMA = "<start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>"
NAMES = ("hermes", "llama3", "json", "mistral", "gemma")

GOOD = [
    ("hermes", f"<tool_call>\n{ONE}\n</tool_call>", [PARIS], ""),
    ("hermes", f"I look.\n<tool_call>\n{ONE}\n</tool_call>\n<tool_call>{TWO}</tool_call>",
     [PARIS, ("time", {})], "I look."),
    ("hermes", f"<tool_call>{ONE}</tool_call>\nDone.", [PARIS], "Done."),
    ("hermes", f"<tool_call>{ONE}", [PARIS], ""),
    ("hermes", '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>', [PARIS], ""),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
     [PARIS], ""),
    ("hermes", '<tool_call>{"id": 7, "name": "time"}</tool_call>', [("time", {})], ""),
    ("hermes", f'<tool_call>{{"name": "get_weather", "arguments": {NASTY}}}</tool_call>',
     [("get_weather", json.loads(NASTY))], ""),
    ("llama3", LLAMA, [PARIS], ""), ("llama3", f"<|python_tag|>{LLAMA}", [PARIS], ""),
    ("llama3", f" \n{LLAMA}; {LLAMA}", [PARIS, PARIS], ""),
    ("llama3", f"Well. <|python_tag|>{LLAMA}", [PARIS], "Well."),
    ("llama3", '{"type": "function", "name": "time", "parameters": {}}', [("time", {})], ""),
    ("json", f'{{"type": "function", "function": {ONE}}}', [PARIS], ""),
    ("json", '{"name": "get_weather", "input": {"city": "Paris"}}', [PARIS], ""),
    ("json", ONE, [PARIS], ""), ("json", f"```json\n{ONE}\n```", [PARIS], ""),
    ("json", f"[{ONE}, {TWO}]", [PARIS, ("time", {})], ""),
    ("json", f"```\n[\n {ONE},\n {TWO}\n]\n```\nDone.", [PARIS, ("time", {})], "Done."),
    ("json", f"{ONE}\n{TWO}\n", [PARIS, ("time", {})], ""),
    ("mistral", f"[TOOL_CALLS][{ONE}]", [PARIS], ""),
    ("mistral", f"[TOOL_CALLS] [{ONE}, {TWO}]", [PARIS, ("time", {})], ""),
    ("mistral", f"Let me see.[TOOL_CALLS]get_weather[ARGS]{PARIS_JSON}", [PARIS], "Let me see."),
    ("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]{PARIS_JSON}[TOOL_CALLS]time[ARGS]{{}}",
     [PARIS, ("time", {})], ""),
    ("mistral", f"[TOOL_CALLS]get_weather{PARIS_JSON}", [PARIS], ""),
    ("mistral", '[TOOL_CALLS][{"name": "time", "arguments": {}, "id": "aB3456789"}]', [("time", {})], ""),
    ("gemma", GEMMA, [PARIS], ""), ("gemma", f"Ok. {GEMMA}{GEMMA} end", [PARIS, PARIS], "Ok. end"),
    ("gemma", "<start_function_call>call:get_weather{days:3,city:<escape>a \"b\" {c}, é 😀\n<escape>,"
              "l:[1,<escape>x<escape>,{k:true}],e:{},n:null,w:plain word}<end_function_call>",
     [("get_weather", {"days": 3, "city": 'a "b" {c}, é 😀\n', "l": [1, "x", {"k": True}], "e": {},
                       "n": None, "w": "plain word"})], ""),
    ("gemma", "<start_function_call>call:time{}<end_function_call>", [("time", {})], ""),
]


@pytest.mark.parametrize(("name", "text", "calls", "rest"), GOOD)
def test_calls(read, name, text, calls, rest):
    turn = read(name, text)
    assert turn.parsed == calls
    assert turn.text.split() == rest.split()


def test_gemma_4(read):
    text = '<|tool_call>call:get_weather{<|"|>city<|"|>:<|"|>Paris<|"|>}<tool_call|>'
    turn = read("gemma", text, variant="4")
    assert turn.parsed == [PARIS] and not turn.text


BAD = ["", " ", "Hello.", " a  b \n", "{", "[", "{}", "[]", "[1, 2]", '{"name": "get_weather"', "```",
       "``` python", "```json\nprint()", '{"name": "unknown", "arguments": {}}',
       '{"name": "time", "arguments": 3}',
       '{"name": "time", "arguments": "no"}', '{"name": "time", "arguments": "{\\"a\\": NaN}"}',
       '{"name": 3, "arguments": {}}', '{"city": "Paris"}', '{"a": {"name": "time", "arguments": {}}}',
       "<tool_call>", "<tool_call>no</tool_call>",
       '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
       "<tool_call><tool_call>", '<tool_call>{"name": "ti', "a < b <tool", "</tool_call>", "<|python_tag|>",
       "<|python_tag|>print(3)", "[TOOL_CALLS]", "[TOOL_CALLS]unknown[ARGS]{}", "[TOOL_CALLS][",
       "[TOOL_CALLS][[",
       "[TOOL_CALLS][a", "[TOOL_CALLS]time", "[TOOL_CALLS]time\n{}", "<start_function_call>call:unknown{}",
       "<start_function_call>time{}", "<start_function_call>call:ti", "[TOOL", "x" * 400 + "{", "é😀\ufffd",
       "[" * 100, '{"a":' * 80, "[TOOL_CALLS]" + "x" * 300]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", BAD)
def test_what_is_no_call_is_text(read, name, text):
    turn = read(name, text)
    assert not turn.calls and turn.text == text


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reasoning", [None, THINK])
def test_any_text_without_tools_is_as_it_is(read, name, reasoning):
    for text in (*BAD, *(text for _, text, _, _ in GOOD)):
        assert read(name, text, given=[], reasoning=reasoning).text == text
    assert isinstance(parser(TurnFormat(name), []), PlainTurn)


def test_arguments_that_stop_being_json_stay_and_the_rest_is_text(read):
    turn = read("hermes", '<tool_call>{"name": "time", "arguments": {"a": 1, oh no</tool_call> x')
    assert turn.calls == [["time", '{"a": 1, ']] and turn.text == "oh no</tool_call> x"
    turn = read("gemma", "<start_function_call>call:time{a:1,b:{{,")
    assert turn.calls[0][0] == "time" and turn.text.endswith(",")


def test_a_call_within_what_is_no_call(read):
    turn = read("hermes", f"<tool_call>oops <tool_call>{ONE}</tool_call>")
    assert turn.parsed == [PARIS] and turn.text == "<tool_call>oops"
    turn = read("mistral", f"[TOOL_CALLS]oops\n[TOOL_CALLS][{TWO}]")
    assert turn.parsed == [("time", {})] and turn.text == "[TOOL_CALLS]oops"


def test_arguments_come_as_they_are_written(tools):
    turn = parser(TurnFormat("hermes"), tools)
    deltas = turn.push('<tool_call>{"name": "get_weather", "arguments": {"ci')
    assert [(delta.name, delta.arguments) for delta in deltas] == [("get_weather", '{"ci')]
    assert [delta.arguments for delta in turn.push('ty": "P')] == ['ty": "P']
    assert [delta.arguments for delta in turn.push('aris"}}\n</tool')] == ['aris"}']
    assert turn.push("_call>") == [] == turn.finish()


def test_text_comes_as_soon_as_it_is_certain(tools):
    turn = parser(TurnFormat("hermes"), tools)
    assert [turn.push(text)[0].text for text in ("He", "llo", " wor")] == ["He", "llo", " wor"]
    assert turn.push(" <tool_") == [] and [delta.text for delta in turn.push("x")] == [" <tool_x"]


REASONED = [("<think>\nHm, <tool_call>?\n</think>\n\n", "Hm, <tool_call>?"), ("<think>\n\n</think>\n\n", ""),
            ("\n<think>a</think>", "a")]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("before", "reasoning"), REASONED)
@pytest.mark.parametrize(("name", "text", "calls", "rest"), GOOD)
def test_reasoning_before_it(read, before, reasoning, name, text, calls, rest):
    turn = read(name, before + text, reasoning=THINK)
    assert turn.reasoning == reasoning and turn.parsed == calls and turn.text.split() == rest.split()
    opened = read(name, before.lstrip().removeprefix("<think>") + text, reasoning=THINK, opened=True)
    assert opened == turn


@pytest.mark.parametrize("name", NAMES)
def test_reasoning_that_does_not_end(read, name):
    turn = read(name, "<think> on and on </thi", reasoning=THINK)
    assert (turn.reasoning, turn.text) == ("on and on </thi", "")
    assert read(name, "no <think>later</think>", reasoning=THINK).text == "no <think>later</think>"
    assert read(name, "<thi", reasoning=THINK).text == "<thi"
    assert read(name, "<think>", reasoning=THINK).parts == []


PIECES = st.one_of(st.sampled_from([
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>",
    "```json\n", "```", "<start_function_call>", "<end_function_call>", "<escape>", "call:time", "time",
    "{", "}", "[", "]", ",", ";", " ", "\n", ":", '"', "\\", '"name": ', '"arguments": ', '{"function": ',
    "3", "a", ONE, TWO, LLAMA, GEMMA, f"<tool_call>{ONE[:30]}"]), st.text(max_size=3))


@settings(max_examples=150)
@given(st.data())
def test_how_a_text_is_cut_makes_no_difference(read, data):
    text = "".join(data.draw(st.lists(PIECES, max_size=12)))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=10))
    options = {"reasoning": data.draw(st.sampled_from([None, THINK])), "opened": data.draw(st.booleans()),
               "given": data.draw(st.sampled_from([[], [Tool("time"), Tool("get_weather")]])),
               "bare": data.draw(st.booleans())}
    for name in NAMES:
        together = read(name, text, **options)
        assert together == read(name, text, cuts, **options) == read(name, text, range(len(text)), **options)
        if not together.calls and options["reasoning"] is None:
            assert together.text == text


@settings(max_examples=80)
@given(st.data())
def test_nothing_is_lost(read, data):
    """Letters that nothing has a use for come out, in their order, as text or as arguments."""
    pieces = data.draw(st.lists(PIECES, max_size=12))
    text = "".join(f"{piece}\u2603{number}\u2603" for number, piece in enumerate(pieces))
    for name in NAMES:
        turn = read(name, text, bare=len(pieces) % 2 == 0)
        shown = turn.text + "".join(arguments for _, arguments in turn.calls)
        shown = shown.replace("\\u2603", "\u2603")
        assert all(f"\u2603{number}\u2603" in shown for number in range(len(pieces)))


def test_a_prompt_that_opens_reasoning():
    format = TurnFormat("hermes", THINK)
    assert opens_reasoning(format, "<|im_start|>assistant\n<think>\n")
    assert not opens_reasoning(format, "<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not opens_reasoning(format, "<|im_start|>assistant\n")
    assert not opens_reasoning(TurnFormat("hermes"), "<think>")


def test_formats_by_name(real):
    from quantkit.structure.turns import turn_format
    assert turn_format(real.tokenizer).name == "json" and turn_format(real.tokenizer).reasoning is None
    assert turn_format(real.tokenizer, "hermes").name == "hermes"
    with pytest.raises(UsageError, match="hermes"):
        turn_format(real.tokenizer, "qwen")
