"""Tools, reasoning and structure in chat completions, as the official client reads them."""


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


def test_a_bias_decides(shared):
    token = shared.loaded.tokenizer.encode("z", special=False)[0]
    answer = ask(shared.openai(), max_tokens=3, logit_bias={str(token): 100})
    assert answer.choices[0].message.content == "zzz"
    penalized = ask(shared.openai(), max_tokens=8, presence_penalty=2, frequency_penalty=2)
    plain = ask(shared.openai(), max_tokens=8)
    assert penalized.choices[0].message.content != plain.choices[0].message.content
