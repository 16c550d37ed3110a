"""Anthropic's client for Python against ``/v1/messages`` of a running server.

    quantkit serve-local MODEL
    python evals/serving/clients/anthropic_python.py [URL]

Needs ``pip install anthropic``. The last line is ``N passed, M failed``; exit code 1 if any failed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Literal

import anthropic
from pydantic import BaseModel
from suite import PLACE, QUESTION, WEATHER, Suite, fits, server

TOOLS = [{"name": "weather", "description": "The weather of a city.", "input_schema": WEATHER}]
GREEDY = {"temperature": 0}
"""In the body, but newer versions of the client have no argument for it."""
ORDER = ("message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
         "message_stop")


class MessagePlace(BaseModel):
    """An answer for ``parse``."""

    kind: Literal["city", "village"]


def texts(suite: Suite, client: anthropic.Anthropic, model: str) -> None:
    """Messages of text."""
    ask = {"model": model, "messages": QUESTION, "max_tokens": 24, "extra_body": GREEDY}
    text, used = "", 0
    with suite.check("a message"):
        done = client.messages.create(**ask, system="Answer in one short sentence.")
        text, used = done.content[0].text, done.usage.output_tokens
        assert text and done.type == "message" and done.role == "assistant" and done.content[0].type == "text"
        assert done.stop_reason in ("end_turn", "max_tokens") and done.usage.input_tokens > 0
    with suite.check("streamed: Anthropic's events in their order, and the same text"):
        events = list(client.messages.create(**ask, system="Answer in one short sentence.", stream=True))
        kinds = [event.type for event in events if event.type != "ping"]
        assert tuple(dict.fromkeys(kinds)) == ORDER, kinds
        assert "".join(e.delta.text for e in events if e.type == "content_block_delta") == text
        end = next(event for event in events if event.type == "message_delta")
        assert end.delta.stop_reason in ("end_turn", "max_tokens") and end.usage.output_tokens == used
    with suite.check("the client's stream helper"):
        with client.messages.stream(**ask, system="Answer in one short sentence.") as stream:
            pieces = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert pieces == final.content[0].text == text
    with suite.check("max_tokens"):
        done = client.messages.create(**ask | {"max_tokens": 2})
        assert done.stop_reason == "max_tokens" and done.usage.output_tokens == 2
    with suite.check("stop_sequences"):
        plain = client.messages.create(**ask).content[0].text
        word = plain.split()[2]
        done = client.messages.create(**ask, stop_sequences=[word])
        assert done.stop_reason == "stop_sequence" and done.stop_sequence == word
        assert done.content[0].text == plain.split(word)[0]
    with suite.check("a conversation, content as blocks, a system text as blocks"):
        done = client.messages.create(**ask | {"messages": [
            {"role": "user", "content": [{"type": "text", "text": "My name is Ada."}]},
            {"role": "assistant", "content": [{"type": "text", "text": "Hello, Ada."}]},
            {"role": "user", "content": "What is my name?"}]},
            system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}])
        assert done.content[0].text
    with suite.check("count_tokens"):
        counted = client.messages.count_tokens(model=model, messages=QUESTION)
        assert counted.input_tokens == client.messages.create(**ask).usage.input_tokens


def tools(suite: Suite, client: anthropic.Anthropic, model: str) -> None:
    """Tools."""
    ask = {"model": model, "messages": QUESTION, "max_tokens": 200, "extra_body": GREEDY, "tools": TOOLS}
    for choice in ({"type": "tool", "name": "weather"}, {"type": "any"}):
        with suite.check(f"a tool is called with arguments that fit: {choice['type']}"):
            done = client.messages.create(**ask, tool_choice=choice)
            call = next(block for block in done.content if block.type == "tool_use")
            assert done.stop_reason == "tool_use" and call.name == "weather" and fits(call.input, WEATHER)
    with suite.check("a tool, streamed: the same arguments"):
        choice = {"type": "tool", "name": "weather"}
        plain = [b.input for b in client.messages.create(**ask, tool_choice=choice).content
                 if b.type == "tool_use"]
        with client.messages.stream(**ask, tool_choice=choice) as stream:
            final = stream.get_final_message()
        assert [block.input for block in final.content if block.type == "tool_use"] == plain
        assert final.stop_reason == "tool_use"
    with suite.check("the turn after a result is a text"):
        first = client.messages.create(**ask, tool_choice={"type": "tool", "name": "weather"})
        results = [{"type": "tool_result", "tool_use_id": block.id, "content": "Sunny, 21 degrees"}
                   for block in first.content if block.type == "tool_use"]
        turn = [*QUESTION, {"role": "assistant", "content": first.content},
                {"role": "user", "content": results}]
        done = client.messages.create(**ask | {"messages": turn}, tool_choice={"type": "none"})
        assert [block.type for block in done.content] == ["text"] and done.content[0].text
    with suite.check("a result that is an error, and auto"):
        use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris", "days": 1}}
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True,
                  "content": [{"type": "text", "text": "no connection"}]}
        done = client.messages.create(**ask | {"messages": [
            *QUESTION, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]})
        assert done.content and done.stop_reason in ("end_turn", "tool_use", "max_tokens")


def schemas(suite: Suite, client: anthropic.Anthropic, model: str) -> None:
    """Answers that a schema describes."""
    ask = {"model": model, "messages": QUESTION, "max_tokens": 200, "extra_body": GREEDY}
    with suite.check("output_config with a schema"):
        done = client.messages.create(**ask, output_config={"format": {"type": "json_schema",
                                                                       "schema": PLACE}})
        assert fits(json.loads(done.content[0].text), PLACE) and done.stop_reason == "end_turn"
    with suite.check("messages.parse with a pydantic model"):
        parsed = client.messages.parse(**ask, output_format=MessagePlace).parsed_output
        assert isinstance(parsed, MessagePlace)


def errors(suite: Suite, client: anthropic.Anthropic, model: str) -> None:
    """What is refused, by the client's exceptions."""
    ask = {"model": model, "messages": QUESTION, "max_tokens": 4}
    with suite.check("the only model answers to any name"):
        assert client.messages.create(**ask | {"model": "no-such-model"}).model == model
    for label, body, kind in (
            ("temperature 9 is 400", {"extra_body": {"temperature": 9}}, anthropic.BadRequestError),
            ("no messages are 400", {"messages": []}, anthropic.BadRequestError),
            ("a prompt that doesn't fit is 400",
             {"messages": [{"role": "user", "content": "word " * 60000}]}, anthropic.BadRequestError)):
        with suite.check(label):
            try:
                client.messages.create(**ask | body)
            except kind as error:
                assert isinstance(error.body, dict) and error.body["type"] == "error", error.body
                assert error.body["error"]["type"] == "invalid_request_error"
                assert error.body["error"]["message"]
            else:
                raise AssertionError(f"no {kind.__name__}")


async def together(suite: Suite, url: str, model: str) -> None:
    """The asynchronous client, with several requests at once."""
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=5) as client:
        async def ask(index: int) -> str:
            done = await client.messages.create(model=model, max_tokens=16, extra_body=GREEDY, messages=[
                {"role": "user", "content": f"Count to {index + 3}."}])
            return str(done.content[0].text)

        with suite.check("eight requests at once have the texts that they have alone"):
            alone = [await ask(index) for index in range(8)]
            assert await asyncio.gather(*map(ask, range(8))) == alone


def main() -> int:
    """Returns the exit code."""
    url, model = server(__doc__)
    suite = Suite(f"anthropic {anthropic.__version__} for Python")
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120)
    for part in (texts, tools, schemas, errors):
        part(suite, client, model)
    asyncio.run(together(suite, url, model))
    return suite.finish()


if __name__ == "__main__":
    sys.exit(main())
