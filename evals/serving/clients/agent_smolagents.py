"""smolagents' tool-calling agent against a running server: a task with two tools.

    quantkit serve-local MODEL
    python evals/serving/clients/agent_smolagents.py [URL]

Needs ``pip install smolagents openai``. The framework sends ``tool_choice: required`` in every step; which
tool is called is the model's choice, its own ``final_answer`` included. The last line is ``N passed, M
failed``; exit code 1 if any failed.
"""

from __future__ import annotations

import sys
from importlib.metadata import version

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool
from smolagents.memory import ActionStep
from suite import Suite, server

TASK = "How many thousand people live in Paris? Look it up, then give the final answer."
CALLS: list[str] = []


@tool
def lookup(city: str) -> int:
    """How many thousand people live in a city.

    Args:
        city: The city's name.
    """
    CALLS.append("lookup")
    return {"Paris": 2100, "London": 8900}.get(city, 100)


@tool
def calculate(first: int, second: int) -> int:
    """Add two numbers.

    Args:
        first: The first number.
        second: The second number.
    """
    CALLS.append("calculate")
    return first + second


def main() -> int:
    """Returns the exit code."""
    url, name = server(__doc__)
    suite = Suite(f"smolagents {version('smolagents')}")
    for stream in (False, True):
        for tools in ([lookup], [lookup, calculate]):
            with suite.check(f"{len(tools)} tools{', streamed' if stream else ''}: calls, then an answer"):
                model = OpenAIModel(name, api_base=f"{url}/v1", api_key="none", temperature=0, max_tokens=160)
                agent = ToolCallingAgent(tools=tools, model=model, max_steps=3, stream_outputs=stream,
                                         verbosity_level=LogLevel.OFF)
                answer = agent.run(TASK)
                steps = [step for step in agent.memory.steps if isinstance(step, ActionStep)]
                called = [call for step in steps for call in step.tool_calls or []]
                errors = [str(step.error) for step in steps
                          if step.error and "max steps" not in str(step.error)]
                assert called and not errors, errors
                assert {call.name for call in called} <= {"lookup", "calculate", "final_answer"}
                assert answer is not None and str(answer) != ""
    return suite.finish()


if __name__ == "__main__":
    sys.exit(main())
