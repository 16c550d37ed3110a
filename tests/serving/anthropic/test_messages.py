"""``/v1/messages``: every answer and every event is what the official client's types say."""

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from quantkit.runtime.generate import generate
from quantkit.runtime.sampler import Sampling

from ..conftest import events

PATH = "/v1/messages"
GREEDY = {"temperature": 0}
"""The newest client has no parameter for it."""
USER = [{"role": "user", "content": "the cat"}]
TOOL = {"name": "look", "description": "Look.",
        "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}}}
EVENT: TypeAdapter = TypeAdapter(RawMessageStreamEvent)


@pytest.fixture
def client(shared):
    return anthropic.Anthropic(base_url=shared.url, api_key="none", max_retries=0, timeout=60)


def post(shared, **body):
    return shared.post(PATH, {"messages": USER, "max_tokens": 30, **body})


def test_a_text(client, loaded):
    ids = loaded.tokenizer.chat([{"role": "system", "content": "Be brief."}, *USER])
    wanted = generate(loaded, [ids], Sampling(max_tokens=9))[0]
    answer = client.messages.create(model="tiny", system="Be brief.", messages=USER, max_tokens=9,
                                    extra_body=GREEDY)
    Message.model_validate(answer.model_dump())
    assert answer.content[0].text == wanted.text and answer.role == "assistant"
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == len(ids)
    assert answer.usage.output_tokens == len(wanted.token_ids)
    assert answer.stop_reason == ("max_tokens" if wanted.finish_reason == "length" else "end_turn")


def test_a_stop_sequence_is_named(client):
    whole = client.messages.create(model="tiny", messages=USER, max_tokens=9,
                                   extra_body=GREEDY).content[0].text
    stop = whole[3:5]
    answer = client.messages.create(model="tiny", messages=USER, max_tokens=9, extra_body=GREEDY,
                                    stop_sequences=["never there", stop])
    assert answer.stop_reason == "stop_sequence" and answer.stop_sequence == stop
    assert answer.content[0].text == whole[:whole.index(stop)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_whole_turn_in_blocks(client, scripted, stream):
    scripted()
    options = {"model": "tiny", "messages": USER, "max_tokens": 30, "tools": [TOOL]}
    if stream:
        with client.messages.stream(**options) as stream:
            assert "".join(stream.text_stream) == "Let me look."
            answer = stream.get_final_message()
    else:
        answer = client.messages.create(**options)
    Message.model_validate(answer.model_dump())
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, call, other = answer.content
    assert thinking.thinking == "I need a tool." and text.text == "Let me look."
    assert (call.id, call.name, call.input) == ("call_a", "look", {"place": "here"})
    assert (other.id, other.name, other.input) == ("call_b", "wait", {})


def test_events_come_in_their_order(shared, scripted):
    scripted()
    sent = events(post(shared, tools=[TOOL], stream=True, **GREEDY), EVENT)
    assert [sent[0]["type"], sent[-2]["type"], sent[-1]["type"]] == ["message_start", "message_delta",
                                                                        "message_stop"]
    inside = [event for event in sent if event["type"].startswith("content_block")]
    assert [event["index"] for event in inside] == sorted(event["index"] for event in inside)
    for index, kind in enumerate(["thinking", "text", "tool_use", "tool_use"]):
        block = [event for event in inside if event["index"] == index]
        assert block[0]["type"] == "content_block_start" and block[0]["content_block"]["type"] == kind
        assert block[-1]["type"] == "content_block_stop" and {event["type"] for event in block[1:-1]} == {
            "content_block_delta"}
    assert sent[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert sent[-2]["usage"]["output_tokens"] == 30


def test_one_call_alone_ends_the_turn_with_tool_use(client, scripted):
    scripted()
    answer = client.messages.create(
        model="tiny", messages=USER, max_tokens=2000, tools=[TOOL],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert answer.stop_reason == "tool_use"
    assert [block.type for block in answer.content].count("tool_use") == 1


def test_content_can_be_sent_back_with_a_result(client, scripted, prepared):
    scripted()
    answer = client.messages.create(model="tiny", messages=USER, max_tokens=30, tools=[TOOL])
    client.messages.create(
        model="tiny", max_tokens=1, tools=[TOOL], thinking={"type": "disabled"},
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[*USER, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "call_a", "content": [{"type": "text", "text": "a hat"}]},
            {"type": "tool_result", "tool_use_id": "call_b", "content": "no", "is_error": True},
            {"type": "text", "text": "go on"}]}])
    messages, given, options = prepared[-1]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "tool",
                                                         "user"]
    assert messages[2]["content"] == "Let me look." and messages[2]["reasoning_content"] == "I need a tool."
    assert messages[2]["tool_calls"][0]["function"] == {"name": "look", "arguments": {"place": "here"}}
    assert messages[3] == {"role": "tool", "tool_call_id": "call_a", "content": "a hat"}
    assert messages[4]["content"] == "Error: no"
    assert options == {} and [tool.name for tool in given] == ["look"]


def test_tokens_are_counted(client, shared):
    count = client.messages.count_tokens(model="tiny", system="Be brief.", messages=USER).input_tokens
    assert count == len(shared.loaded.tokenizer.chat([{"role": "system", "content": "Be brief."}, *USER]))


def test_errors_have_its_shape(shared, strict, live):
    client = anthropic.Anthropic(base_url=strict.url, api_key="none", max_retries=0, timeout=60)
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(model="other", messages=USER, max_tokens=1)
    assert caught.value.body["type"] == "error" and caught.value.body["error"]["type"] == "not_found_error"
    assert "'tiny'" in caught.value.body["error"]["message"]
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model="tiny", messages=USER, max_tokens=10**6)
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    with shared.http as plain:
        for answer, kind in ((plain.get(PATH), "invalid_request_error"),
                             (plain.post(PATH, content=b"{"), "invalid_request_error"),
                             (plain.post(PATH, headers={"host": "evil.example"}), "permission_error"),
                             (plain.post(PATH, content=b" " * 5_000_000), "request_too_large")):
            body = answer.json()
            assert set(body) == {"type", "error"} and set(body["error"]) == {"type", "message"}
            assert body["type"] == "error" and body["error"]["type"] == kind
    made = live(key="sesame-1234")
    for key, status in (("sesame-1234", 200), ("sesame", 401), ("", 401)):
        answer = made.post(PATH, {"messages": USER, "max_tokens": 1}, headers={
            "x-api-key": key, "anthropic-version": "2023-06-01"})
        assert answer.status_code == status
    assert answer.json()["error"]["type"] == "authentication_error"
