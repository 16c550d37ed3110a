"""OpenAI's Agents SDK against a running server: a task with two tools, and a handoff.

    quantkit serve-local MODEL
    python evals/serving/clients/agent_openai.py [URL]

Needs ``pip install openai-agents``. A small model wouldn't call tools by itself, so each agent forces its
tool once; after that the SDK sets ``tool_choice`` back to ``auto``, and agents here stop offering tools, so
that an answer must come. Both of OpenAI's APIs are used, streaming and not. The last line is ``N passed, M
failed``; exit code 1 if any failed.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunContextWrapper,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from suite import Suite, server

TASK = "How many people live in Paris and London together?"
CITIES = Literal["Paris", "London", "Rome"]
Small = Annotated[int, Field(ge=0, le=1000)]


class AgentPlace(BaseModel):
    """A final answer with a shape."""

    city: CITIES
    people: Small


class Calls:
    """Which tools ran; each is offered until it did."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def unused(self, name: str) -> Callable[[RunContextWrapper[Any], Any], bool]:
        """Whether a tool is still offered."""
        return lambda _context, _agent: name not in self.names


def tools(calls: Calls) -> tuple[Any, Any]:
    """A tool that looks up and one that calculates."""
    @function_tool(is_enabled=calls.unused("lookup"))
    def lookup(city: CITIES) -> int:
        """How many thousand people live in a city."""
        calls.names.append("lookup")
        return {"Paris": 2100, "London": 8900, "Rome": 2700}[city]

    @function_tool(is_enabled=calls.unused("calculate"))
    def calculate(first: Small, operation: Literal["add", "subtract"], second: Small) -> int:
        """Calculate with two numbers."""
        calls.names.append("calculate")
        return first + second if operation == "add" else first - second

    return lookup, calculate


async def run_checks(suite: Suite, kind: Any, client: AsyncOpenAI, name: str) -> None:
    """All checks with one of the two APIs."""
    def agent(choice: str | None, offered: list[Any], **more: Any) -> Agent[Any]:
        return Agent(name="helper", instructions="Use the tools, then answer in one sentence.",
                     model=kind(model=name, openai_client=client), tools=offered,
                     model_settings=ModelSettings(temperature=0, max_tokens=128, tool_choice=choice), **more)

    label = kind.__name__
    with suite.check(f"{label}: an answer without tools"):
        assert (await Runner.run(agent(None, []), "Hello")).final_output.strip()
    for tool in ("lookup", "calculate"):
        with suite.check(f"{label}: {tool} runs, then an answer of the output type comes"):
            calls = Calls()
            offered = [offer for offer in tools(calls) if offer.name == tool]
            done = await Runner.run(agent(tool, offered, output_type=AgentPlace), TASK, max_turns=3)
            assert calls.names == [tool] and isinstance(done.final_output, AgentPlace)
    if kind is OpenAIChatCompletionsModel:  # of responses the SDK refuses texts that max_tokens cuts
        with suite.check(f"{label}: lookup runs, then a text comes"):
            calls = Calls()
            done = await Runner.run(agent("lookup", [tools(calls)[0]]), TASK, max_turns=3)
            assert calls.names == ["lookup"] and done.final_output.strip()
    with suite.check(f"{label}: required, until both tools ran, then a text comes"):
        calls = Calls()
        helper = agent("required", list(tools(calls)), reset_tool_choice=False)
        # `required` is an error without tools, so the last turn goes to an agent that has none
        state = await Runner.run(helper.clone(tool_use_behavior="stop_on_first_tool"), TASK, max_turns=2)
        state = await Runner.run(helper.clone(tool_use_behavior="stop_on_first_tool"),
                                 [*state.to_input_list(), {"role": "user", "content": TASK}], max_turns=2)
        done = await Runner.run(agent(None, []), [*state.to_input_list(), {"role": "user", "content": TASK}])
        assert set(calls.names) == {"lookup", "calculate"} and done.final_output.strip()
    with suite.check(f"{label}: a tool and an answer, streamed"):
        calls = Calls()
        run = Runner.run_streamed(agent("lookup", [tools(calls)[0]], output_type=AgentPlace), TASK,
                                  max_turns=3)
        kinds = [event.name async for event in run.stream_events() if event.type == "run_item_stream_event"]
        assert calls.names == ["lookup"] and isinstance(run.final_output, AgentPlace)
        assert {"tool_called", "tool_output", "message_output_created"} <= set(kinds), kinds
    with suite.check(f"{label}: an output type"):
        done = await Runner.run(agent(None, [], output_type=AgentPlace), "Describe Paris.")
        assert isinstance(done.final_output, AgentPlace)
    with suite.check(f"{label}: a handoff to another agent, which answers"):
        other = agent(None, []).clone(name="other")
        done = await Runner.run(agent("transfer_to_other", [], handoffs=[other]), TASK, max_turns=3)
        assert done.last_agent.name == "other" and done.final_output.strip()


def main() -> int:
    """Returns the exit code."""
    url, name = server(__doc__)
    suite = Suite(f"OpenAI Agents SDK {version('openai-agents')}")
    set_tracing_disabled(True)

    async def everything() -> None:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
                await run_checks(suite, kind, client, name)

    asyncio.run(everything())
    return suite.finish()


if __name__ == "__main__":
    sys.exit(main())
