"""OpenAI's client for Python against a running server: chat completions, completions, embeddings, errors.

    quantkit serve-local MODEL
    python evals/serving/clients/openai_python.py [URL]

Needs ``pip install openai``. ``/v1/responses`` is in ``openai_responses.py``. The last line is ``N passed, M
failed``; exit code 1 if any failed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Literal

import openai
from pydantic import BaseModel
from suite import PLACE, QUESTION, TEXTS, WEATHER, Suite, fits, server

TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The weather of a city.",
                                           "parameters": WEATHER}},
         {"type": "function", "function": {"name": "people", "description": "How many people live in a city.",
                                           "parameters": {"type": "object", "properties": {
                                               "city": {"type": "string", "maxLength": 20}},
                                               "required": ["city"], "additionalProperties": False}}}]
NAMED = {"type": "function", "function": {"name": "weather"}}


class ChatPlace(BaseModel):
    """An answer for ``parse``."""

    kind: Literal["city", "village"]
    capital: bool


def chats(suite: Suite, client: openai.OpenAI, model: str) -> None:
    """Chat completions without structure."""
    ask = {"model": model, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    text, tokens = "", 0
    with suite.check("chat"):
        done = client.chat.completions.create(**ask)
        text = done.choices[0].message.content
        tokens = done.usage.completion_tokens
        assert text and done.choices[0].message.role == "assistant"
        assert done.object == "chat.completion" and done.choices[0].finish_reason in ("stop", "length")
        assert done.usage.total_tokens == done.usage.prompt_tokens + tokens and 0 < tokens <= 24
    with suite.check("chat, streamed: the same text, one finish reason, usage at the end"):
        chunks = list(client.chat.completions.create(**ask, stream=True,
                                                     stream_options={"include_usage": True}))
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] is not None
        assert sum(bool(c.choices and c.choices[0].finish_reason) for c in chunks) == 1
        assert chunks[-1].usage.completion_tokens == tokens and not chunks[-1].choices
        assert len({c.id for c in chunks}) == 1
    with suite.check("chat, the client's stream helper"):
        complete = ask | {"stop": [","]}  # the helper raises where max_tokens cuts an answer
        with client.chat.completions.stream(**complete) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion()
        assert {"chunk", "content.delta", "content.done"} <= kinds
        assert final.choices[0].message.content == \
            client.chat.completions.create(**complete).choices[0].message.content
    with suite.check("a stream that is closed early doesn't disturb the next request"):
        stream = client.chat.completions.create(**ask | {"max_tokens": 500}, stream=True)
        next(iter(stream))
        stream.close()
        assert client.chat.completions.create(**ask).choices[0].message.content == text
    with suite.check("n=2 with a seed, twice the same"):
        many = {"n": 2, "seed": 5, "temperature": 1.0}
        first, other = (client.chat.completions.create(**ask | many) for _ in range(2))
        assert [c.index for c in first.choices] == [0, 1]
        assert [c.message.content for c in first.choices] == [c.message.content for c in other.choices]
        assert first.choices[0].message.content != first.choices[1].message.content
    with suite.check("stop: a text ends the answer and isn't in it"):
        word = text.split()[2]
        done = client.chat.completions.create(**ask, stop=[word])
        assert done.choices[0].message.content == text.split(word)[0]
        assert done.choices[0].finish_reason == "stop"
    with suite.check("max_completion_tokens"):
        done = client.chat.completions.create(model=model, messages=QUESTION, max_completion_tokens=2)
        assert done.usage.completion_tokens == 2 and done.choices[0].finish_reason == "length"
    with suite.check("logprobs"):
        done = client.chat.completions.create(**ask, logprobs=True, top_logprobs=3)
        entries = done.choices[0].logprobs.content
        assert len(entries) == tokens and all(len(entry.top_logprobs) == 3 for entry in entries)
        assert all(entry.logprob <= 0 for entry in entries)
        assert b"".join(bytes(entry.bytes or b"") for entry in entries).decode().startswith(text[:10])
    with suite.check("system and developer messages, content as parts"):
        done = client.chat.completions.create(**ask | {"messages": [
            {"role": "developer", "content": "Answer in one word."},
            {"role": "user", "content": [{"type": "text", "text": "Name a fruit."}]}]})
        assert done.choices[0].message.content
    with suite.check("logit_bias forces a token"):
        token = client.post("/../tokenize", cast_to=dict, body={"model": model, "prompt": " yes",
                                                                "add_special_tokens": False})["tokens"][0]
        done = client.chat.completions.create(**ask | {"max_tokens": 3}, logit_bias={str(token): 100})
        assert done.choices[0].message.content.split() == ["yes"] * 3
    with suite.check("frequency_penalty and presence_penalty change a text that repeats"):
        long = ask | {"max_tokens": 120, "extra_body": {"ignore_eos": True}}
        plain = client.chat.completions.create(**long).choices[0].message.content
        for penalty in ("frequency_penalty", "presence_penalty"):
            other = client.chat.completions.create(**long, **{penalty: 2.0})
            assert other.choices[0].message.content != plain
    with suite.check("a prompt that is sent again is reported as cached"):
        long = ask | {"messages": [{"role": "user", "content": " ".join(TEXTS * 40)}]}
        client.chat.completions.create(**long)
        details = client.chat.completions.create(**long).usage.prompt_tokens_details
        assert details is not None and details.cached_tokens > 256, details


def structure(suite: Suite, client: openai.OpenAI, model: str) -> None:
    """Schemas and tools."""
    ask = {"model": model, "messages": QUESTION, "max_tokens": 200, "temperature": 0}
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE, "strict": True}}
    with suite.check("response_format json_schema"):
        done = client.chat.completions.create(**ask, response_format=form)
        assert fits(json.loads(done.choices[0].message.content), PLACE)
        assert done.choices[0].finish_reason == "stop"
        chunks = client.chat.completions.create(**ask, response_format=form, stream=True)
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == done.choices[0].message.content
    with suite.check("response_format json_object"):
        done = client.chat.completions.create(**ask | {"max_tokens": 400, "messages": [
            {"role": "user", "content": "Give me a tiny JSON object."}]},
            response_format={"type": "json_object"})
        if done.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(done.choices[0].message.content), dict)
        else:  # a small model may never close it
            assert done.choices[0].message.content.lstrip().startswith("{")
    with suite.check("chat.completions.parse with a pydantic model"):
        done = client.chat.completions.parse(**ask, response_format=ChatPlace)
        assert isinstance(done.choices[0].message.parsed, ChatPlace)
    with suite.check("tools: a named one is called with arguments that fit"):
        done = client.chat.completions.create(**ask, tools=TOOLS, tool_choice=NAMED)
        call = done.choices[0].message.tool_calls[0]
        assert call.function.name == "weather" and fits(json.loads(call.function.arguments), WEATHER)
        assert call.id and call.type == "function"
    with suite.check("tools: required"):
        done = client.chat.completions.create(**ask, tools=TOOLS, tool_choice="required")
        assert done.choices[0].finish_reason == "tool_calls"
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
        for call in done.choices[0].message.tool_calls:
            assert fits(json.loads(call.function.arguments), schemas[call.function.name])
    with suite.check("tools, streamed: the same calls"):
        complete = client.chat.completions.create(**ask, tools=TOOLS, tool_choice=NAMED)
        with client.chat.completions.stream(**ask, tools=TOOLS, tool_choice=NAMED) as stream:
            done = stream.get_final_completion()
        calls, other = (answer.choices[0].message.tool_calls for answer in (complete, done))
        assert [c.function.arguments for c in calls] == [c.function.arguments for c in other]
        assert [c.function.name for c in calls] == [c.function.name for c in other]
    with suite.check("tools: the turn after a result is a text"):
        first = client.chat.completions.create(**ask, tools=TOOLS, tool_choice=NAMED).choices[0].message
        turn = [*QUESTION, first.model_dump(exclude_none=True), *(
            {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees"}
            for call in first.tool_calls)]
        done = client.chat.completions.create(**ask | {"messages": turn}, tools=TOOLS, tool_choice="none")
        assert done.choices[0].message.content and not done.choices[0].message.tool_calls
    with suite.check("tools: auto gives a text or calls"):
        message = client.chat.completions.create(**ask, tools=TOOLS).choices[0].message
        assert message.content or message.tool_calls
    for key, value in (("guided_choice", ["harbour", "lantern"]),
                       ("structured_outputs", {"choice": ["harbour", "lantern"]}),
                       ("guided_regex", "(harbour|lantern)"),
                       ("structured_outputs", {"grammar": 'start: "harbour" | "lantern"'})):
        with suite.check(f"{key} as in vLLM: {value}"):
            done = client.chat.completions.create(**ask, extra_body={key: value})
            assert done.choices[0].message.content in ("harbour", "lantern")


def texts(suite: Suite, client: openai.OpenAI, model: str) -> None:
    """Completions and embeddings."""
    ask = {"model": model, "max_tokens": 12, "temperature": 0}
    with suite.check("completions: plain and streamed are the same"):
        done = client.completions.create(prompt="Once upon a time", **ask)
        chunks = client.completions.create(prompt="Once upon a time", **ask, stream=True)
        assert "".join(c.choices[0].text for c in chunks) == done.choices[0].text != ""
    with suite.check("completions: several prompts, each as alone"):
        done = client.completions.create(prompt=list(TEXTS), **ask)
        alone = [client.completions.create(prompt=text, **ask).choices[0].text for text in TEXTS]
        assert [choice.text for choice in sorted(done.choices, key=lambda c: c.index)] == alone
    with suite.check("completions: echo with logprobs scores the prompt"):
        done = client.completions.create(prompt=TEXTS[0], model=model, echo=True, logprobs=1, max_tokens=0)
        scores = done.choices[0].logprobs
        assert "".join(scores.tokens) == TEXTS[0] and len(scores.token_logprobs) == done.usage.prompt_tokens
        assert all(value is not None and value <= 0 for value in scores.token_logprobs[1:])
    with suite.check("completions: token ids as a prompt"):
        ids = client.post("/../tokenize", cast_to=dict, body={"model": model, "prompt": TEXTS[0]})["tokens"]
        assert client.completions.create(prompt=ids, **ask).choices[0].text == \
            client.completions.create(prompt=TEXTS[0], **ask).choices[0].text
    with suite.check("embeddings: floats and base64 are the same, and of length 1"):
        first = client.embeddings.create(model=model, input=list(TEXTS))  # the client asks for base64
        plain = client.embeddings.create(model=model, input=list(TEXTS), encoding_format="float")
        for item, other in zip(first.data, plain.data, strict=True):
            assert max(abs(a - b) for a, b in zip(item.embedding, other.embedding, strict=True)) < 1e-6
            assert abs(sum(value * value for value in other.embedding) - 1) < 1e-3
        assert first.usage.prompt_tokens == first.usage.total_tokens > 0
        assert plain.data[0].embedding != plain.data[1].embedding


def errors(suite: Suite, client: openai.OpenAI, model: str) -> None:
    """What is refused, by the client's exceptions."""
    ask = {"model": model, "messages": QUESTION, "max_tokens": 4}
    with suite.check("models: list, retrieve, and a name that isn't there"):
        assert model in [entry.id for entry in client.models.list()]
        assert client.models.retrieve(model).id == model
        expect(openai.NotFoundError, lambda: client.models.retrieve("no-such-model"))
    with suite.check("the only model answers to any name"):
        assert client.chat.completions.create(**ask | {"model": "no-such-model"}).model == model
    for name, value in (("temperature", 9), ("n", 0), ("messages", []), ("max_tokens", -2), ("stop", 5)):
        with suite.check(f"{name}={value} is 400 and names the parameter"):
            error = expect(openai.BadRequestError, lambda key=name, bad=value:
                           client.chat.completions.create(**ask | {key: bad}))
            assert name in (error.param or "") and error.code and error.type == "invalid_request_error"
    with suite.check("an unknown parameter is ignored and named"):
        answer = client.chat.completions.with_raw_response.create(**ask, extra_body={"temprature": 0.5})
        assert answer.headers["quantkit-ignored"] == "temprature"
    with suite.check("a prompt that doesn't fit is 400, context_length_exceeded"):
        error = expect(openai.BadRequestError, lambda: client.chat.completions.create(
            **ask | {"messages": [{"role": "user", "content": "word " * 60000}]}))
        assert error.code == "context_length_exceeded"
    with suite.check("a strict schema that isn't one is 400"):
        expect(openai.BadRequestError, lambda: client.chat.completions.create(**ask, response_format={
            "type": "json_schema",
            "json_schema": {"name": "bad", "strict": True, "schema": {"type": "no-such-type"}}}))


async def together(suite: Suite, url: str, model: str) -> None:
    """The asynchronous client, with many requests at once."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=5) as client:
        async def ask(index: int) -> str:
            stream = await client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": f"Count to {index + 3}."}],
                max_tokens=24, temperature=0, stream=True)
            return "".join([c.choices[0].delta.content or "" async for c in stream])

        with suite.check("sixteen streams at once have the texts that they have alone"):
            alone = [await ask(index) for index in range(16)]
            assert await asyncio.gather(*map(ask, range(16))) == alone


def expect(kind: type[openai.APIStatusError], call: Callable[[], object]) -> openai.APIStatusError:
    """The error that a call raises. Raises AssertionError if it doesn't."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def main() -> int:
    """Returns the exit code."""
    url, model = server(__doc__)
    suite = Suite(f"openai {openai.__version__} for Python")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    for part in (chats, structure, texts, errors):
        part(suite, client, model)
    asyncio.run(together(suite, url, model))
    return suite.finish()


if __name__ == "__main__":
    sys.exit(main())
