"""Tools as OpenAI's chat completions have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from quantkit.serving.conversation import MAX_TOOLS, Arguments, CallId, Description, ToolName
from quantkit.serving.schema import JsonObject, LeftOutPart, RequestPart, kind_tag
from quantkit.structure.turns import Tool


class FunctionDefinition(RequestPart):
    """A function that the model may call."""

    name: ToolName
    description: Description | None = None
    parameters: JsonObject = Field(default_factory=dict, description="JSON schema of its arguments.")
    strict: bool = False


class FunctionTool(RequestPart):
    """A tool; functions are the only kind."""

    ignored: ClassVar[frozenset[str]] = frozenset({"cache_control"})

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


class OtherTool(LeftOutPart):
    """A tool that another server runs itself."""

    supported = ("function",)


AnyTool = Annotated[Annotated[FunctionTool, Tag("function[]")] | Annotated[OtherTool, Tag("other[]")],
                    Discriminator(lambda tool: kind_tag(tool, ("function",)))]
Tools = Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


def plain_tools(tools: Sequence[FunctionTool | OtherTool]) -> list[Tool]:
    """Those that the model may call, in no API's words."""
    return [tool.tool() for tool in tools if isinstance(tool, FunctionTool)]


ToolChoice = Literal["none", "auto", "required"] | FunctionChoice
