"""OpenAI's client for Python against ``/v1/responses`` of a running server.

    quantkit serve-local MODEL
    python evals/serving/clients/openai_responses.py [URL]

Needs ``pip install openai``. The last line is ``N passed, M failed``; exit code 1 if any failed.
"""

from __future__ import annotations

import json
import sys
from typing import Literal

import openai
from pydantic import BaseModel
from suite import PLACE, WEATHER, Suite, fits, server

TOOLS = [{"type": "function", "name": "weather", "description": "The weather of a city.",
          "parameters": WEATHER, "strict": True}]
NAMED = {"type": "function", "name": "weather"}
ORDER = ("response.created", "response.in_progress", "response.output_item.added",
         "response.content_part.added", "response.output_text.delta", "response.output_text.done",
         "response.content_part.done", "response.output_item.done", "response.completed")


class ResponsePlace(BaseModel):
    """An answer for ``parse``."""

    kind: Literal["city", "village"]


def main() -> int:
    """Returns the exit code."""
    url, model = server(__doc__)
    suite = Suite(f"openai {openai.__version__} for Python, responses")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    ask = {"model": model, "input": "What is the capital of France?", "max_output_tokens": 48,
           "temperature": 0}
    text = ""
    with suite.check("a response"):
        done = client.responses.create(**ask, instructions="Answer in one short sentence.")
        text = done.output_text
        assert text and done.object == "response" and done.status in ("completed", "incomplete")
        assert done.output[-1].type == "message" and done.output[-1].role == "assistant"
        assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens
        assert done.usage.input_tokens_details.cached_tokens >= 0
    with suite.check("an answer that max_output_tokens cuts is incomplete"):
        done = client.responses.create(**ask | {"max_output_tokens": 16}, extra_body={"seed": 1})
        if done.usage.output_tokens == 16:
            assert done.status == "incomplete" and done.incomplete_details.reason == "max_output_tokens"
    with suite.check("streamed: OpenAI's events in their order, and the same text"):
        events = list(client.responses.create(**ask, instructions="Answer in one short sentence.",
                                              stream=True))
        kinds = list(dict.fromkeys(event.type for event in events))
        last = kinds[-1]
        assert last in ("response.completed", "response.incomplete")
        assert kinds == [kind if kind != "response.completed" else last for kind in ORDER], kinds
        assert [event.sequence_number for event in events] == list(range(len(events)))
        deltas = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        assert deltas == text == events[-1].response.output_text
    with suite.check("the client's stream helper"):
        # the helper demands a response that is completed, so the answer needs an end
        with client.responses.stream(**ask | {"max_output_tokens": 200}, text={"format": {
                "type": "json_schema", "name": "place", "schema": PLACE, "strict": True}}) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_response()
        assert fits(json.loads(final.output_text), PLACE) and "response.output_text.delta" in kinds
    with suite.check("a conversation as items"):
        done = client.responses.create(**ask | {"input": [
            {"role": "user", "content": [{"type": "input_text", "text": "My name is Ada."}]},
            {"role": "assistant", "content": "Hello, Ada."},
            {"role": "user", "content": "What is my name?"}]})
        assert done.output_text
    with suite.check("what came back can be sent again"):
        first = client.responses.create(**ask)
        again = [{"role": "user", "content": ask["input"]}, *first.output,
                 {"role": "user", "content": "And of Spain?"}]
        assert client.responses.create(**ask | {"input": again}).output_text
    with suite.check("a schema"):
        done = client.responses.create(**ask | {"max_output_tokens": 200}, text={"format": {
            "type": "json_schema", "name": "place", "schema": PLACE, "strict": True}})
        assert fits(json.loads(done.output_text), PLACE) and done.status == "completed"
    with suite.check("responses.parse with a pydantic model"):
        done = client.responses.parse(**ask | {"max_output_tokens": 200}, text_format=ResponsePlace)
        assert isinstance(done.output_parsed, ResponsePlace)
    calls = ask | {"tools": TOOLS, "tool_choice": NAMED, "max_output_tokens": 200}
    with suite.check("a tool that is named is called, and its result answered"):
        done = client.responses.create(**calls)
        call = next(item for item in done.output if item.type == "function_call")
        assert call.name == "weather" and fits(json.loads(call.arguments), WEATHER) and call.call_id
        done = client.responses.create(**calls | {"tool_choice": "none", "input": [
            {"role": "user", "content": ask["input"]}, *done.output,
            {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"}]})
        assert done.output_text and all(item.type != "function_call" for item in done.output)
    with suite.check("a tool, streamed"):
        events = list(client.responses.create(**calls, stream=True))
        arguments = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
        done_ = [e.arguments for e in events if e.type == "response.function_call_arguments.done"]
        assert done_ and arguments == "".join(done_) and fits(json.loads(done_[0]), WEATHER)
    with suite.check("previous_response_id, which needs a store, is refused with a reason"):
        try:
            client.responses.create(**ask, previous_response_id="resp_unknown")
        except (openai.BadRequestError, openai.NotFoundError) as error:
            assert error.param == "previous_response_id" and "previous_response_id" in error.message
        else:
            raise AssertionError("it was accepted")
    with suite.check("a wrong value is 400 and names the parameter"):
        try:
            client.responses.create(**ask | {"temperature": 9})
        except openai.BadRequestError as error:
            assert error.param == "temperature"
        else:
            raise AssertionError("it was accepted")
    return suite.finish()


if __name__ == "__main__":
    sys.exit(main())
