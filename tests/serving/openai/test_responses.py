"""``/v1/responses``: every answer and every event is what the official client's types say."""

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from quantkit.runtime.generate import generate
from quantkit.runtime.sampler import Sampling

from ..conftest import events

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "look", "description": "Look.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}}
EVENT: TypeAdapter = TypeAdapter(ResponseStreamEvent)


def test_a_text(shared, loaded):
    ids = loaded.tokenizer.chat([{"role": "system", "content": "Be brief."},
                                 {"role": "user", "content": "the cat"}])
    wanted = generate(loaded, [ids], Sampling(max_tokens=9))[0]
    answer = shared.openai().responses.create(model="tiny", input="the cat", instructions="Be brief.",
                                              max_output_tokens=9, temperature=0, metadata={"a": "b"})
    Response.model_validate(answer.model_dump())
    assert answer.output_text == wanted.text
    assert answer.usage.input_tokens == len(ids) and answer.usage.output_tokens == len(wanted.token_ids)
    assert answer.usage.input_tokens_details.cached_tokens >= 0
    assert answer.metadata == {"a": "b"} and answer.instructions == "Be brief." and answer.store is False
    assert answer.id.startswith("resp_") and answer.output[0].id.startswith("msg_")


def test_a_text_that_is_cut_is_incomplete(shared):
    body = {"input": "the cat", "max_output_tokens": 2, "temperature": 0}
    answer = shared.post(PATH, body).json()
    assert answer["status"] == "incomplete" and answer["output"][-1]["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert events(shared.post(PATH, {**body, "stream": True}), EVENT)[-1]["type"] == "response.incomplete"


def test_a_whole_turn_in_items(shared, scripted):
    scripted()
    answer = shared.openai().responses.create(model="tiny", input="the cat", max_output_tokens=30,
                                              tools=[TOOL])
    Response.model_validate(answer.model_dump())
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, call, other = answer.output
    assert reasoning.content[0].text == "I need a tool." and message.content[0].text == "Let me look."
    assert (call.call_id, call.name, call.arguments) == ("call_a", "look", '{"place": "here"}')
    assert (other.call_id, other.name, other.arguments) == ("call_b", "wait", "{}")


def test_events_come_in_their_order(shared, scripted):
    scripted()
    sent = events(shared.post(PATH, {"input": "the cat", "max_output_tokens": 30, "tools": [TOOL],
                                     "temperature": 0, "stream": True}), EVENT)
    assert [event["sequence_number"] for event in sent] == list(range(len(sent)))
    kinds = [event["type"].removeprefix("response.") for event in sent]
    filled = [kind for before, kind in zip(["", *kinds], kinds)
              if not kind.endswith("delta") or before != kind]
    text = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done",
            "content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
            "output_item.done"]
    reasoning = [kind.replace("output_text", "reasoning_text") for kind in text]
    assert filled == ["created", "in_progress", *reasoning, *text, *call, *call, "incomplete"]
    last = sent[-1]["response"]
    done = [event["item"] for event in sent if event["type"] == "response.output_item.done"]
    assert last["output"] == done and [item["type"] for item in done] == [
        "reasoning", "message", "function_call", "function_call"]
    for number, item in enumerate(done):
        parts = [event for event in sent if event.get("output_index") == number]
        written = "".join(event["delta"] for event in parts if event["type"].endswith("delta"))
        assert written == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
        assert {event.get("item_id", item["id"]) for event in parts} == {item["id"]}
    assert last["usage"]["output_tokens"] == 30


def test_the_official_client_streams(shared, scripted):
    scripted()
    with shared.openai().responses.stream(model="tiny", input="a", max_output_tokens=2000, tools=[TOOL],
                                           parallel_tool_calls=False) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert final.output_text == "Let me look."


def test_output_can_be_sent_back_with_a_result(shared, scripted, prepared):
    scripted()
    client = shared.openai()
    answer = client.responses.create(model="tiny", input="the cat", max_output_tokens=30, tools=[TOOL])
    items = [{"role": "user", "content": "the cat"}, *(item.model_dump() for item in answer.output),
             {"type": "function_call_output", "call_id": "call_a", "output": "a hat"},
             {"role": "developer", "content": [{"type": "input_text", "text": "go on"}]}]
    client.responses.create(model="tiny", input=items, max_output_tokens=1, tools=[TOOL])
    messages = prepared[-1][0]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "system"]
    turn = messages[1]
    assert turn["content"] == "Let me look." and turn["reasoning_content"] == "I need a tool."
    assert [call["function"]["name"] for call in turn["tool_calls"]] == ["look", "wait"]
    assert messages[2]["tool_call_id"] == "call_a"


def test_nothing_is_kept(shared):
    answer = shared.openai().responses.create(model="tiny", input="a", max_output_tokens=1)
    with pytest.raises(openai.NotFoundError):
        shared.openai().responses.retrieve(answer.id)
