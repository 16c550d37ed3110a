"""Pydantic AI's agents against a running server: a task with two tools.

    quantkit serve-local MODEL
    python evals/serving/clients/agent_pydantic_ai.py [URL]

Needs ``pip install "pydantic-ai-slim[openai]"``. A small model wouldn't call tools by itself, so the agent
forces one after the other: it looks a number up, calculates with it, and then answers. The framework parses
the calls, checks their arguments and runs the tools. Both of OpenAI's APIs are used, streaming and not. The
last line is ``N passed, M failed``; exit code 1 if any failed.
"""

from __future__ import annotations

import asyncio
import sys
from importlib.metadata import version
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, RunContext, ToolOutput
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.messages import ToolCallPart, ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from suite import Suite, server

TASK = "How many people live in Paris and London together?"
CITIES = Literal["Paris", "London", "Rome"]
Small = Annotated[int, Field(ge=0, le=1000)]


class TypedPlace(BaseModel):
    """A final answer with a shape."""

    city: CITIES
    people: Small


class InOrder(AbstractCapability[None]):
    """Forces these tools, one a step, and then a text."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def get_model_settings(self) -> Any:
        """The settings of each step."""
        def settings(context: RunContext[None]) -> ModelSettings:
            step = context.run_step - 1
            return ModelSettings(tool_choice=[self._names[step]] if step < len(self._names) else "none")

        return settings


def agent(model: Any, calls: list[str], order: tuple[str, ...]) -> Agent[None, str]:
    """An agent with two tools that note what they were called with."""
    made = Agent(model, instructions="Use the tools, then answer in one sentence.",
                 capabilities=[InOrder(*order)], retries=0,
                 model_settings=ModelSettings(temperature=0, max_tokens=128))

    @made.tool_plain
    def lookup(city: CITIES) -> int:
        """How many thousand people live in a city."""
        calls.append("lookup")
        return {"Paris": 2100, "London": 8900, "Rome": 2700}[city]

    @made.tool_plain
    def calculate(first: Small, operation: Literal["add", "subtract"], second: Small) -> int:
        """Calculate with two numbers."""
        calls.append("calculate")
        return first + second if operation == "add" else first - second

    return made


def check_run(messages: list[Any], calls: list[str], order: tuple[str, ...], output: str) -> None:
    """Each tool ran, in order, each call has its result, and a text came last. Raises AssertionError."""
    parts = [part for message in messages for part in message.parts]
    asked = [part for part in parts if isinstance(part, ToolCallPart)]
    returned = [part for part in parts if isinstance(part, ToolReturnPart)]
    assert list(dict.fromkeys(calls)) == list(order), calls
    assert [part.tool_call_id for part in asked] == [part.tool_call_id for part in returned]
    assert len(asked) == len(calls) and output.strip()


async def streamed(made: Agent[None, str]) -> tuple[str, list[Any]]:
    """The final text, collected from pieces, and all messages."""
    text = ""
    async with made.run_stream(TASK) as run:
        async for piece in run.stream_text(delta=True):
            text += piece
        return text, run.all_messages()


def main() -> int:
    """Returns the exit code."""
    url, name = server(__doc__)
    suite = Suite(f"Pydantic AI {version('pydantic-ai-slim')}")
    order = ("lookup", "calculate")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        def model(kind: Any = kind) -> Any:
            return kind(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))

        with suite.check(f"{kind.__name__}: an answer without tools"):
            assert Agent(model(), model_settings=ModelSettings(max_tokens=32)).run_sync("Hello").output
        with suite.check(f"{kind.__name__}: two tools, then a text"):
            calls: list[str] = []
            done = agent(model(), calls, order).run_sync(TASK)
            check_run(done.all_messages(), calls, order, done.output)
            assert done.usage.requests == 3 and done.usage.output_tokens > 0
        with suite.check(f"{kind.__name__}: two tools, then a text, streamed"):
            calls = []
            text, messages = asyncio.run(streamed(agent(model(), calls, order)))
            check_run(messages, calls, order, text)
        with suite.check(f"{kind.__name__}: a final answer by an output tool that must be called"):
            shaped = Agent(model(), output_type=ToolOutput(TypedPlace), retries=0,
                           model_settings=ModelSettings(temperature=0, max_tokens=128))
            assert isinstance(shaped.run_sync("Describe Paris.").output, TypedPlace)
    return suite.finish()


if __name__ == "__main__":
    sys.exit(main())
