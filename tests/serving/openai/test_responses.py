"""``/v1/responses``: every answer and every event is what the official client's types say."""

import json

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from quantkit.runtime.generate import generate
from quantkit.runtime.sampler import Sampling

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "look", "description": "Look.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}}
EVENT = TypeAdapter(ResponseStreamEvent)


def events(answer):
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    sent = []
    for block in answer.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event)
        sent.append(event)
    assert [event["sequence_number"] for event in sent] == list(range(len(sent)))
    return sent


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
    assert events(shared.post(PATH, {**body, "stream": True}))[-1]["type"] == "response.incomplete"


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
                                     "temperature": 0, "stream": True}))
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


@pytest.mark.parametrize(("change", "param", "said"), [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "no response is kept"),
    ({"conversation": "conv_1"}, "conversation", "no response is kept"),
    ({"background": True}, "background", "not supported"), ({"truncation": "auto"}, "truncation", "not supp"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "function"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"), ({"input": []}, "input", "empty"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "function_call_output"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1:9/"}]}]},
     "input[0].content[0].image_url", "a message is text"),
    ({"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "["}]},
     "input[0].arguments",
     "JSON object"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "json_schema"),
    ({"include": ["file_search_call.results"]}, "include[0]", "encrypted_content"),
    ({"max_output_tokens": 0}, "max_output_tokens", "greater"),
    ({"metadata": {"a": "x" * 600}}, "metadata.a", "512"),
])
def test_what_cant_be_is_refused_by_name(strict, change, param, said):
    answer = strict.post(PATH, {"input": "a", "max_output_tokens": 1, **change})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param and said in answer.json()["error"]["message"]


def test_what_changes_nothing_is_taken(shared):
    harmless = {"store": True, "user": "me", "service_tier": "auto", "truncation": "disabled",
                "background": False,
                "reasoning": {"summary": "auto", "effort": None}, "include": ["reasoning.encrypted_content"],
                "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
                "text": {"format": {"type": "text"}},
                "previous_response_id": None, "stream_options": {"include_obfuscation": False}}
    assert shared.post(PATH, {"input": "a", "max_output_tokens": 1, **harmless}).status_code == 200


def test_nothing_is_kept(shared):
    answer = shared.openai().responses.create(model="tiny", input="a", max_output_tokens=1)
    with pytest.raises(openai.NotFoundError):
        shared.openai().responses.retrieve(answer.id)


def test_an_error_in_a_stream_is_an_event(live, monkeypatch):
    made = live()
    kind, count = type(made.engine.loaded.model), iter(range(100))
    push = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *args, **options: (
        1 / 0 if next(count) == 2 else push(self, *args, **options)))
    sent = events(made.post(PATH, {"input": "a", "max_output_tokens": 9, "stream": True, "temperature": 0}))
    assert sent[-1]["type"] == "error" and sent[-1]["code"] == "internal_error"
    assert sent[-1]["message"] == "internal error"
    assert [type(error) for error in made.errors] == [ZeroDivisionError]
