"""Tools and structures, in no API's words: what a model is given, and what its turn must look like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from quantkit.serving.conversation import MAX_ARGUMENTS, TOOL_NAME
from quantkit.serving.errors import RefusedValue
from quantkit.serving.schema import Unicode, check_json
from quantkit.structure.grammar import Structure
from quantkit.structure.turns import Tool
from quantkit.support.errors import SourceError
from quantkit.support.strict_json import parse_object


def read_arguments(arguments: str) -> dict[str, Any]:
    """Arguments of a call in an earlier turn; none at all are an empty object.

    Raises:
        ValueError: they are no JSON object.
    """
    try:
        return check_json(parse_object((arguments or "{}").encode(), "the text", next="send a JSON object"))
    except SourceError as error:
        raise ValueError(f"the arguments of a tool call must be a JSON object: {error.what}") from None


def _arguments(arguments: str) -> str:
    read_arguments(arguments)
    return arguments


ToolName = Annotated[str, Field(pattern=TOOL_NAME)]
Description = Annotated[str, Unicode]
"""Of a tool: as long as a body may be. The prompt that it becomes part of must fit the context."""
Arguments = Annotated[str, Field(max_length=MAX_ARGUMENTS), Unicode, AfterValidator(_arguments)]
CallId = Annotated[str, Field(min_length=1, max_length=256), Unicode]


def choose_tools(tools: Sequence[Tool], choice: str | None, required: bool, structure: Structure | None,
                 param: str = "tool_choice") -> tuple[tuple[Tool, ...], Structure | None]:
    """Tools that the model is given, and what its turn must look like.

    Args:
        tools: all that are given.
        choice: ``none``, ``auto``, or with ``required`` the name of a tool, or ``None``: any tool.
        required: whether the turn must be a call.
        structure: what is asked for beside.
        param: the parameter that the choice comes from.

    Raises:
        RefusedValue: an unknown or doubled tool, or a choice without tools.
    """
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise RefusedValue("tools", "two tools have the same name", "invalid_value")
    if required and not tools:
        raise RefusedValue(param, f"{param} asks for a tool call, and no tools are given", "invalid_value")
    if required and choice is not None and choice not in names:
        raise RefusedValue(param, f"{param} names {choice!r}, which is none of the tools", "invalid_value")
    if not required and (choice == "none" or not tools):
        return (), structure
    if required:  # the turn is calls, and what an answer would look like is for a later turn
        return tuple(tools), Structure(tools=tuple(tools), tool_choice=choice or "required")
    if structure is not None:
        return tuple(tools), replace(structure, tools=tuple(tools), tool_choice="auto")
    strict = any(tool.strict for tool in tools)
    return tuple(tools), Structure(tools=tuple(tools), tool_choice="auto") if strict else None
