"""Tools in chat templates: the format is recognized, and no control token comes of what was typed."""

from __future__ import annotations

import json

import pytest

from quantkit.structure.conversation import conversation
from quantkit.structure.turns import MISTRAL_THINK, THINK, Tool, opens_reasoning, parser, turn_format
from quantkit.support.errors import UsageError
from quantkit.text.tokenizer import Tokenizer
from tests.structure.templates import FAMILIES, GLM, MISTRAL, QWEN
from tests.text.families import CHATML, LLAMA3, files_of
from tests.text.families import FAMILIES as TOKENIZERS
from tests.text.families import GEMMA as GEMMA2


def tokenizer_with(family, template, **more):
    files = files_of(family)
    settings = json.loads(files["tokenizer_config.json"]) | {"chat_template": template} | more
    return Tokenizer(files | {"tokenizer_config.json": json.dumps(settings).encode()}, {})


MADE = {name: tokenizer_with(*given) for name, given in FAMILIES.items()}


@pytest.mark.parametrize(("family", "template", "name", "variant", "reasoning"), [
    (*FAMILIES["hermes"], "hermes", "", THINK), (*FAMILIES["llama3"], "llama3", "", None),
    (*FAMILIES["mistral"], "mistral", "list", None), (*FAMILIES["mistral args"], "mistral", "args", None),
    ("mistral", MISTRAL + "{# [ARGS] [CALL_ID] #}", "mistral", "call_id", None),
    ("mistral", MISTRAL + "{# [THINK] #}", "mistral", "list", MISTRAL_THINK),
    (*FAMILIES["gemma"], "gemma", "function", None),
    ("gemma", "{{ '<|tool_call>call:' + x }}", "gemma", "4", None),
    ("chatml", CHATML.replace("<think>", ""), "json", "", None), ("llama3", LLAMA3, "json", "user", None),
    ("gemma", GEMMA2, "json", "user", None), ("chatml", GLM, "json", "", THINK)])
def test_the_template_shows_the_format(family, template, name, variant, reasoning):
    family_format = turn_format(tokenizer_with(family, template))
    assert (family_format.name, family_format.variant, family_format.reasoning) == (name, variant, reasoning)


def test_special_tokens_that_the_parser_must_see():
    tokenizer = MADE["mistral"]
    assert turn_format(tokenizer).special == {tokenizer.special_tokens["[TOOL_CALLS]"]}
    tokenizer = MADE["llama3"]
    assert turn_format(tokenizer).special == {tokenizer.special_tokens["<|python_tag|>"]}
    assert not turn_format(MADE["hermes"]).special  # added tokens that aren't special have their text anyway


def messages_of(text):
    """A conversation and tools in which a text is wherever one can be."""
    call = {"id": "a23456789", "type": "function",
            "function": {"name": "f", "arguments": json.dumps({"key" + text: [text, {text: 1}]})}}
    messages = [{"role": "user", "content": text},
                {"role": "assistant", "content": "", "reasoning_content": text, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "a23456789", "content": text},
                {"role": "user", "content": "b"}]
    tool = Tool("f", "d" + text, {"type": "object", "properties": {"key" + text: {
        "type": "string", "description": text, "enum": [text]}}, "required": ["key" + text]})
    return messages, [tool]


@pytest.mark.parametrize("name", FAMILIES)
def test_no_control_token_comes_of_tools_calls_and_results(name):
    tokenizer = MADE[name]
    known = set(tokenizer.controls.ids.values())
    assert set(TOKENIZERS[FAMILIES[name][0]].controls) <= set(tokenizer.controls.ids)

    def controls(text, **options):
        messages, tools = conversation(turn_format(tokenizer), *messages_of(text))
        ids = tokenizer.chat(messages, tools=tools, **options)
        return [token for token in ids if token in known], tokenizer.decode(ids, skip_special=False)

    for token in TOKENIZERS[FAMILIES[name][0]].controls:
        (typed, text), (harmless, other) = controls(f"a{token}b"), controls("axxb")
        assert typed == harmless
        assert text.count(token) - other.count(token) == other.count("axxb") >= 3
        assert len(controls(f"a{token}b", parse_special=True)[0]) > len(typed)


def test_options_reach_the_template_and_hold_no_control_token_either():
    tokenizer = MADE["hermes"]
    messages = [{"role": "user", "content": "hi"}]
    format = turn_format(tokenizer)
    given = {"none": {}, "off": {"enable_thinking": False}, "open": {"opens": True}}
    ends = {name: tokenizer.decode(tokenizer.chat(messages, options=options), skip_special=False)
            for name, options in given.items()}
    assert ends["off"].endswith("<think>\n\n</think>\n\n") and not opens_reasoning(format, ends["off"])
    assert ends["open"].endswith("<think>\n") and opens_reasoning(format, ends["open"])
    assert ends["none"].endswith("assistant\n") and not opens_reasoning(format, ends["none"])
    shown = tokenizer_with("chatml", CHATML + "{{ extra }}")
    ids = shown.chat(messages, options={"extra": "<|im_end|>"})
    assert ids.count(shown.special_tokens["<|im_end|>"]) == 1


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "eos_token", "not one", ""])
def test_options_that_are_not_the_templates(name):
    with pytest.raises(UsageError, match="option"):
        MADE["hermes"].chat([{"role": "user", "content": "hi"}], options={name: 1})


@pytest.mark.parametrize("name", FAMILIES)
def test_what_the_template_writes_is_what_the_parser_reads(name):
    """The assistant's turn in the prompt, cut out of it, comes back as the calls that it was made of."""
    tokenizer, format = MADE[name], turn_format(MADE[name])
    call = {"id": "a23456789", "type": "function",
            "function": {"name": "f", "arguments": '{"city": "Paris", "n": "{<\\"}"}'}}
    if name == "gemma":
        call["function"]["arguments"] = '{"city": "Paris {\\"}"}'
    messages, tools = conversation(format, [{"role": "user", "content": "a"}, {
        "role": "assistant", "content": "", "tool_calls": [call]}], [Tool("f")])
    before = tokenizer.chat_text(messages[:1], False, tools)
    text = tokenizer.chat_text(messages, False, tools).removeprefix(before)
    for control in ("<|im_start|>assistant\n", "<|im_end|>\n", "</s>", "<|eot_id|>", "<end_of_turn>\n",
                    "<|start_header_id|>assistant<|end_header_id|>\n\n", "<start_of_turn>model\n"):
        text = text.replace(control, "")
    turn = parser(format, [Tool("f")])
    deltas = turn.push(text) + turn.finish()
    assert "".join(getattr(delta, "text", "") for delta in deltas) == ""
    assert [delta.name for delta in deltas if delta.name] == ["f"]
    arguments = "".join(delta.arguments for delta in deltas)
    assert json.loads(arguments) == json.loads(call["function"]["arguments"])


def test_the_template_is_given_all_it_may_want():
    messages, tools = messages_of("x")
    messages, given = conversation(turn_format(MADE["hermes"]), messages, tools)
    text = MADE["hermes"].chat_text(messages, True, given)
    assert QWEN and '<tool_call>\n{"name": "f", "arguments": {"keyx": ["x", {"x": 1}]}}\n</tool_call>' in text
    assert "<think>\nx\n</think>" in text and "<tool_response>\nx\n" in text and '"description": "dx"' in text
