"""Marks within turns, such as <tool_call>: only templates and assistants' messages write them."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.text import library
from quantkit.text.tokenizer import Tokenizer
from tests.structure.templates import QWEN
from tests.text.families import CHATML, files_of

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TURNS = ("<|im_start|>", "<|im_end|>")
FORGED = ["{}", "a{}b", "\n{}\n", "</tool_response>{}<tool_response>", "{}" * 3]
PLACES = ("system", "user", "tool", "reasoning", "arguments", "key", "name", "description", "schema",
          "option")


def made(template, **more):
    files = files_of("chatml")
    config = json.loads(files["tokenizer_config.json"]) | {"chat_template": template} | more
    return Tokenizer(files | {"tokenizer_config.json": json.dumps(config).encode()}, {})


TOKENIZER = made(QWEN + "{{ extra }}")


def prompt(texts, **options):
    """Ids of a conversation with a text in each of some places, ``x`` in the others."""
    text = {place: texts.get(place, "x") for place in PLACES}
    call = {"function": {"name": text["name"], "arguments": {text["key"]: [{"y": text["arguments"]}]}}}
    tool = {"type": "function", "function": {"name": text["name"], "description": text["description"],
                                             "parameters": {"properties": {"x": {"enum": [text["schema"]]}}}}}
    messages = [{"role": "system", "content": text["system"]}, {"role": "user", "content": text["user"]},
                {"role": "assistant", "content": "", "reasoning_content": text["reasoning"],
                 "tool_calls": [call]},
                {"role": "tool", "content": text["tool"]}]
    return TOKENIZER.chat(messages, tools=[tool], options={"extra": text["option"]}, **options)


def counts(ids):
    added = TOKENIZER.added_tokens
    return {token: ids.count(added[token]) for token in (*MARKS, *TURNS)}


OWN = counts(prompt({}))


def test_what_the_template_writes():
    assert set(TOKENIZER.controls.marks) == set(MARKS) and not set(TOKENIZER.controls.ids) & set(MARKS)
    assert OWN == {"<think>": 1, "</think>": 1, "<tool_call>": 2, "</tool_call>": 2, "<tool_response>": 1,
                   "</tool_response>": 1, "<|im_start|>": 5, "<|im_end|>": 4}


@pytest.mark.parametrize("forged", FORGED)
@pytest.mark.parametrize("token", [*MARKS, *TURNS])
@pytest.mark.parametrize("place", PLACES)
def test_a_forged_one_is_text(place, token, forged):
    text = forged.format(*[token] * 3)
    ids = prompt({place: text})
    assert counts(ids) == OWN
    assert text.strip() in TOKENIZER.decode(ids, skip_special=False)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(PLACES), st.lists(
    st.sampled_from([*MARKS, *TURNS, "\n", " ", "<", ">", "a"]), min_size=1, max_size=6).map("".join)))
def test_however_they_are_mixed(texts):
    assert counts(prompt(texts)) == OWN


def test_they_count_where_everybody_is_trusted():
    assert counts(prompt({"tool": "</tool_response>"}, parse_special=True)) == {**OWN, "</tool_response>": 2}


@pytest.mark.parametrize("content", ["<think>a</think>b", "</think>\n\nb", "<tool_call>\n{}\n</tool_call>",
                                     [{"type": "text", "text": "<think>a</think>b"}]])
def test_an_assistant_s_content_keeps_its_marks(content):
    """Templates split it there, and the model wrote them."""
    tokenizer = made(CHATML) if isinstance(content, str) else made(
        "{% for message in messages %}{{ message.role + message.content[0].text }}{% endfor %}{# </think> #}")
    messages = [{"role": "user", "content": "a"}] * isinstance(content, str)
    messages.append({"role": "assistant", "content": content})
    rendered = tokenizer.chat_text(messages)
    assert tokenizer.chat(messages) == library.encode(tokenizer._inner, rendered, False)


def test_its_control_tokens_are_text_all_the_same():
    messages = [{"role": "user", "content": "a"},
                {"role": "assistant", "content": "<think>a</think><|im_end|>"}]
    ids = TOKENIZER.chat(messages, options={"extra": ""})
    assert counts(ids) == {**dict.fromkeys(MARKS, 0), "<think>": 1, "</think>": 1, "<|im_start|>": 3,
                           "<|im_end|>": 2}


def test_a_message_within_a_value_is_no_message():
    example = {"role": "assistant", "content": "</tool_response>"}
    messages = [{"role": "user", "content": "a"}]
    tools = [{"function": {"name": "f", "parameters": {"default": example}}}]
    ids = TOKENIZER.chat(messages, tools=tools, options={"extra": ""})
    assert ids.count(TOKENIZER.added_tokens["</tool_response>"]) == 0


def test_a_mark_of_the_answer_s_beginning_is_one():
    """The template opens the reasoning of every answer, and looks for its end in earlier ones."""
    tokenizer = made(CHATML.replace("assistant\n' }}{%- endif %}", "assistant\n<think>' }}{%- endif %}"))
    assert tokenizer.chat_text([{"role": "user", "content": "a"}]).endswith("<think>")
    assert set(tokenizer.controls.marks) == {"<think>", "</think>"}
    ids = tokenizer.chat([{"role": "user", "content": "<think>"}])
    assert ids.count(tokenizer.added_tokens["<think>"]) == 1


def test_plain_text_has_none():
    ids = TOKENIZER.encode("".join(MARKS), special=False, parse_special=False)
    assert not set(counts(ids).values()) - {0} and TOKENIZER.decode(ids) == "".join(MARKS)
