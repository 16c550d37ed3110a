"""Tools as OpenAI's chat completions have them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from quantkit.serve.conversation import MAX_TOOLS
from quantkit.serve.schema import JsonObject, RequestPart
from quantkit.serve.tools import Arguments, CallId, Description, ToolName
from quantkit.structure.turns import Tool


class FunctionDefinition(RequestPart):
    """A function that the model may call."""

    name: ToolName
    description: Description | None = None
    parameters: JsonObject = Field(default_factory=dict, description="JSON schema of its arguments.")
    strict: bool = False


class FunctionTool(RequestPart):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition

    def tool(self) -> Tool:
        """In no API's words."""
        function = self.function
        return Tool(function.name, function.description or "", function.parameters, function.strict)


class FunctionName(RequestPart):
    """Which function."""

    name: ToolName


class FunctionChoice(RequestPart):
    """This function and no other."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(RequestPart):
    """What was called."""

    name: ToolName
    arguments: Arguments


class ToolCall(RequestPart):
    """A call in an earlier turn."""

    ignored: ClassVar[frozenset[str]] = frozenset({"index"})

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction


Tools = Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | FunctionChoice
