"""LiteLLM against a running server, as OpenAI's API, as vLLM's and as Anthropic's.

    quantkit serve-local MODEL
    python evals/serving/clients/litellm_python.py [URL]

Needs ``pip install litellm``. The last line is ``N passed, M failed``; exit code 1 if any failed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from importlib.metadata import version

from suite import PLACE, QUESTION, TEXTS, WEATHER, Suite, fits, server

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # before the import, which would download a list
import litellm

litellm.suppress_debug_info = True

TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The weather of a city.",
                                           "parameters": WEATHER}}]
NAMED = {"type": "function", "function": {"name": "weather"}}


def chats(suite: Suite, provider: str, base: str, model: str) -> None:
    """What every provider can."""
    ask = {"model": f"{provider}/{model}", "api_base": base, "api_key": "none", "messages": QUESTION,
           "max_tokens": 24, "temperature": 0, "timeout": 120}
    text = ""
    with suite.check(f"{provider}: chat"):
        done = litellm.completion(**ask)
        text = done.choices[0].message.content
        assert text and done.usage.completion_tokens > 0
    with suite.check(f"{provider}: streamed, the same text, and stream_chunk_builder's"):
        chunks = list(litellm.completion(**ask, stream=True, stream_options={"include_usage": True}))
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
        assert litellm.stream_chunk_builder(chunks).choices[0].message.content == text
    with suite.check(f"{provider}: acompletion, eight at once"):
        async def many() -> list[str]:
            done = await asyncio.gather(*(litellm.acompletion(**ask, num_retries=3) for _ in range(8)))
            return [answer.choices[0].message.content for answer in done]

        assert asyncio.run(many()) == [text] * 8
    with suite.check(f"{provider}: a tool that is named is called with arguments that fit"):
        done = litellm.completion(**ask | {"max_tokens": 200}, tools=TOOLS, tool_choice=NAMED)
        call = done.choices[0].message.tool_calls[0]
        assert call.function.name == "weather" and fits(json.loads(call.function.arguments), WEATHER)
        turn = [*QUESTION, done.choices[0].message.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": call.id, "content": "Sunny"}]
        done = litellm.completion(**ask | {"messages": turn}, tools=TOOLS)
        assert done.choices[0].message.content or done.choices[0].message.tool_calls
    with suite.check(f"{provider}: errors are LiteLLM's own kinds"):
        try:
            litellm.completion(**ask | {"temperature": 9})
        except litellm.BadRequestError:
            pass
        else:
            raise AssertionError("no BadRequestError")


def main() -> int:
    """Returns the exit code."""
    url, model = server(__doc__)
    suite = Suite(f"LiteLLM {version('litellm')}")
    for provider, base in (("openai", f"{url}/v1"), ("hosted_vllm", f"{url}/v1"), ("anthropic", url)):
        chats(suite, provider, base, model)
    to = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none", "timeout": 120}
    with suite.check("openai: a schema"):
        done = litellm.completion(**to, messages=QUESTION, max_tokens=200, temperature=0, response_format={
            "type": "json_schema", "json_schema": {"name": "place", "schema": PLACE, "strict": True}})
        assert fits(json.loads(done.choices[0].message.content), PLACE)
    with suite.check("openai: a prompt that doesn't fit is ContextWindowExceededError"):
        try:
            litellm.completion(**to, messages=[{"role": "user", "content": "word " * 60000}], max_tokens=4)
        except litellm.ContextWindowExceededError:
            pass
        else:
            raise AssertionError("no error")
    with suite.check("text_completion"):
        done = litellm.text_completion(**to | {"model": f"text-completion-openai/{model}"},
                                       prompt="Once upon a time", max_tokens=8, temperature=0)
        assert done.choices[0].text
    with suite.check("embedding"):
        done = litellm.embedding(**to, input=list(TEXTS), encoding_format="float")
        assert len(done.data) == 2 and len(done.data[0]["embedding"]) > 8
    with suite.check("responses"):
        done = litellm.responses(**to, input="What is the capital of France?", max_output_tokens=32)
        assert done.output and done.usage.output_tokens > 0
    with suite.check("a router with a deployment that fails goes on with the other"):
        router = litellm.Router(model_list=[
            {"model_name": "first", "litellm_params": to | {"api_base": "http://127.0.0.1:9/v1"}},
            {"model_name": "other", "litellm_params": to}], fallbacks=[{"first": ["other"]}], num_retries=0)
        done = router.completion(model="first", messages=QUESTION, max_tokens=4)
        assert done.usage.completion_tokens > 0
    return suite.finish()


if __name__ == "__main__":
    sys.exit(main())
