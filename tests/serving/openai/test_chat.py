"""Tools, reasoning and structure in chat completions, as the official client reads them."""

import json

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "the cat"}
CALL = {"id": "call_a", "type": "function", "function": {"name": "look", "arguments": '{"place": "here"}'}}


def ask(client, **options):
    return client.chat.completions.create(**{"model": "tiny", "messages": [USER], "max_tokens": 30,
                                             "temperature": 0, "extra_body": {"ignore_eos": True}, **options})


def test_a_whole_turn_with_reasoning_text_and_calls(shared, scripted, tools):
    scripted()
    answer = ask(shared.openai(), tools=tools)
    ChatCompletion.model_validate(answer.model_dump(), strict=True)
    (choice,) = answer.choices
    assert choice.message.content == "Let me look." and choice.message.reasoning_content == "I need a tool."
    assert [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [
        ("call_a", "look", '{"place": "here"}'), ("call_b", "wait", "{}")]
    assert choice.finish_reason == "length", "30 tokens were asked for, and came"
    assert answer.usage.completion_tokens == 30
    assert answer.usage.completion_tokens_details.reasoning_tokens == 2
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


def test_a_streamed_turn_says_the_same(shared, scripted, tools):
    scripted()
    text = reasoning = ""
    calls: dict[int, list[str]] = {}
    for chunk in ask(shared.openai(), tools=tools, stream=True):
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
        delta = chunk.choices[0].delta
        text += delta.content or ""
        reasoning += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or []:
            if call.id is not None:
                assert call.type == "function" and call.index == len(calls)
                calls[call.index] = [call.id, call.function.name, ""]
            calls[call.index][2] += call.function.arguments or ""
    assert (text, reasoning) == ("Let me look.", "I need a tool.")
    assert calls == {0: ["call_a", "look", '{"place": "here"}'], 1: ["call_b", "wait", "{}"]}


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_a_turn_ends_before_the_second(shared, scripted, tools, stream):
    scripted()
    answer = ask(shared.openai(), tools=tools, parallel_tool_calls=False, stream=stream, max_tokens=2000)
    chunks = list(answer) if stream else [answer]
    assert "call_b" not in "".join(chunk.model_dump_json() for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert shared.errors == []


def test_a_turn_of_calls_alone_has_no_text(shared, scripted, tools):
    from quantkit.structure.base import ToolCallDelta

    scripted([[ToolCallDelta(0, "{}", id="x", name="wait")]])
    body = {"messages": [USER], "max_tokens": 2, "tools": tools}
    message = shared.post(PATH, body).json()["choices"][0]["message"]
    assert message["content"] is None and "reasoning_content" not in message


def test_calls_and_their_results_reach_the_template(shared, prepared, tools):
    earlier = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Hm."}
    result = {"role": "tool", "tool_call_id": "call_a", "content": [{"type": "text", "text": "a hat"}]}
    body = {"messages": [USER, earlier, result], "max_tokens": 1, "tools": tools,
            "chat_template_kwargs": {"enable_thinking": False, "date": "2026-11-25"}}
    assert shared.post(PATH, body).status_code == 200
    (messages, given, options), = prepared
    assert messages[1] == {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [{
        "id": "call_a", "type": "function", "function": {"name": "look", "arguments": {"place": "here"}}}]}
    assert messages[2] == {"role": "tool", "content": "a hat", "tool_call_id": "call_a"}
    assert [tool.name for tool in given] == ["look", "wait"] and given[0].parameters["required"] == ["place"]
    assert options == {"enable_thinking": False, "date": "2026-11-25"}


def test_no_choice_means_no_tools(shared, prepared, tools):
    assert shared.post(PATH, {"messages": [USER], "max_tokens": 1, "tools": tools,
                              "tool_choice": "none"}).status_code == 200
    assert prepared[0][1] == ()


def refused(answer, param, said):
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param and said in answer.json()["error"]["message"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("change", "param", "said"), [
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "function"),
    ({"tools": [{"type": "function", "function": {"name": "a"}}] * 129}, "tools", "at most 128"),
    ({"tools": [{"type": "function", "function": {"name": "a"}}] * 2}, "tools", "same name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"x": "y" * 200_000}}}]},
     "tools[0].function.parameters", "at most 131072"),
    ({"tools": [{"type": "function", "function": {"name": "a"}}],
      "tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice", "'b'"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name",
     "missing"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "structured_outputs",
     "more than one"),
    ({"guided_json": "{]"}, "guided_json", "can't be read"),
    ({"guided_choice": []}, "guided_choice", "empty"),
    ({"guided_regex": "x" * 9000}, "guided_regex", "at most 8192"),
    ({"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
     "structured_outputs.disable_any_whitespace", "not supported"),
    ({"structured_outputs": {"json_object": True, "disable_additional_properties": True}},
     "structured_outputs.disable_additional_properties", "not supported"),
    ({"priority": 1}, "priority", "--scheduling-policy priority"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not supported"),
    ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs", "messages"),
    ({"chat_template_kwargs": {"date": "<|im_end|>"}}, "chat_template_kwargs.date", "pattern"),
    ({"chat_template_kwargs": {"date": [1]}}, "chat_template_kwargs.date", "must be"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "which call"),
    ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {
        "name": "a", "arguments": "{"}}]}]}, "messages[0].tool_calls[0].function.arguments", "JSON object"),
    ({"messages": [USER] * 5000}, "messages", "at most 4096"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x", "pattern"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "100"),
    ({"presence_penalty": 3}, "presence_penalty", "2"), ({"kv": "nothing-like-it"}, "kv", "nothing-like-it"),
    ({"priority": 2**40}, "priority", "less"),
])
def test_what_cant_be_is_refused_by_name(strict, change, param, said):
    refused(strict.post(PATH, {"messages": [USER], "max_tokens": 1, **change}), param, said)


def deep(levels):
    return {"a": deep(levels - 1)} if levels else {}


def test_a_schema_has_limits(shared):
    body = {"messages": [USER], "max_tokens": 1, "response_format": {"type": "json_schema", "json_schema": {
        "name": "x", "schema": deep(40)}}}
    refused(shared.post(PATH, body), "response_format.json_schema.schema", "deeper than 32")
    text = json.dumps({**body, "model": "tiny"}).replace('"a"', '"\\ud800"', 1)
    with shared.http as client:
        answer = client.post(PATH, content=text, headers={"content-type": "application/json"})
    assert answer.status_code == 400


def test_an_unknown_token_has_no_bias(shared):
    refused(shared.post(PATH, {"messages": [USER], "max_tokens": 1, "logit_bias": {"99999": 1}}), None,
            "99999")


def test_a_bias_decides(shared):
    token = shared.loaded.tokenizer.encode("z", special=False)[0]
    answer = ask(shared.openai(), max_tokens=3, logit_bias={str(token): 100})
    assert answer.choices[0].message.content == "zzz"
    penalized = ask(shared.openai(), max_tokens=8, presence_penalty=2, frequency_penalty=2)
    plain = ask(shared.openai(), max_tokens=8)
    assert penalized.choices[0].message.content != plain.choices[0].message.content


def test_messages_limits_hold_for_the_official_client(shared):
    with pytest.raises(openai.BadRequestError):
        ask(shared.openai(), messages=[{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/"}}]}])
