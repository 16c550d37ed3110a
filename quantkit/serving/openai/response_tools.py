"""Tools of ``/v1/responses``: as a client gives them, as the model sees them, and what its calls are then.

A model calls functions with JSON. A custom tool takes plain text instead: the model sees a function of one
text. The tools of a namespace are the client's own too: the model sees each as ``NAMESPACE__NAME``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from quantkit.serving.conversation import MAX_TOOLS, Description, ToolName
from quantkit.serving.openai.generation import TextFormat
from quantkit.serving.schema import JsonObject, LeftOutPart, RequestPart, Unicode
from quantkit.structure.grammar import MAX_GRAMMAR, MAX_REGEX
from quantkit.structure.lark_regex import NotRegularError, regular_expression
from quantkit.structure.turns import Tool
from quantkit.support.errors import SourceError
from quantkit.support.strict_json import parse_object

INPUT = "input"
"""The one argument of a custom tool."""
DEFAULT_NAMESPACE = "functions"
"""The namespace whose tools are called by their own names."""


@dataclass(frozen=True)
class ClientTool:
    """A tool of the client's.

    Attributes:
        tool: The tool as the model sees it; its name is no other one's.
        name, namespace: The names by which the client calls it.
        custom: Whether it takes plain text.
        grammar: The grammar of that text, if the request gives one; ``tool`` doesn't have it.
        place: The place of the tool in the request.
    """

    tool: Tool
    name: str
    namespace: str | None = None
    custom: bool = False
    grammar: GrammarFormat | None = None
    place: str = "tools"

    def constrained(self) -> Tool:
        """The tool with its grammar as part of its schema.

        Raises:
            NotRegularError: the grammar can't be.
        """
        if self.grammar is None:
            return self.tool
        regex = self.grammar.definition
        if self.grammar.syntax == "lark":
            regex = regular_expression(regex, MAX_REGEX)
        elif len(regex) > MAX_REGEX:
            raise NotRegularError(f"it has more than {MAX_REGEX} characters")
        text = {"type": "string", "pattern": f"^(?:{regex})$"}
        return replace(self.tool, parameters={**self.tool.parameters, "properties": {INPUT: text}},
                       strict=True)


class ResponseTool(RequestPart):
    """A function that the model may call. When a tool is loaded changes nothing: all are."""

    ignored = frozenset({"output_schema"})
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"defer_loading": (False,), "allowed_callers": ()}

    type: Literal["function"]
    name: ToolName
    description: Description | None = None
    parameters: JsonObject = Field(default_factory=dict, description="JSON schema of its arguments.")
    strict: bool = False

    def client_tool(self, place: str, namespace: str | None = None) -> ClientTool:
        """What it is to the model, and to the client; ``place``: where the request has it."""
        seen = Tool(seen_name(self.name, namespace), self.description or "", self.parameters, self.strict)
        return ClientTool(seen, self.name, namespace, place=place)


class GrammarFormat(RequestPart):
    """A text of a grammar."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR), Unicode]


class CustomTool(RequestPart):
    """A tool that takes plain text, which a grammar may describe."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"defer_loading": (False,), "allowed_callers": ()}

    type: Literal["custom"]
    name: ToolName
    description: Description | None = None
    format: Annotated[TextFormat | GrammarFormat, Field(discriminator="type")] | None = None

    def client_tool(self, place: str, namespace: str | None = None) -> ClientTool:
        about, grammar = [self.description or ""], None
        if isinstance(self.format, GrammarFormat):
            grammar = self.format
            kind = "Lark grammar" if grammar.syntax == "lark" else "regular expression"
            about.append(f"The input is a text of this {kind}:\n{grammar.definition}")
        schema = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
        seen = Tool(seen_name(self.name, namespace), "\n\n".join(filter(None, about)), schema)
        return ClientTool(seen, self.name, namespace, True, grammar, place)


class OtherNamespaceTool(LeftOutPart):
    """A tool that another server runs itself."""

    supported = ("function", "custom")


class NamespaceTool(RequestPart):
    """Tools of the client's under a common name."""

    type: Literal["namespace"]
    name: ToolName
    description: Description | None = None
    tools: Annotated[list[Annotated[
        Annotated[ResponseTool, Tag("function[]")] | Annotated[CustomTool, Tag("custom[]")]
        | Annotated[OtherNamespaceTool, Tag("other[]")], Discriminator(OtherNamespaceTool.tag)]],
        Field(max_length=MAX_TOOLS, fail_fast=True)]


class OtherResponseTool(LeftOutPart):
    """The same outside of a namespace: ``web_search``, ``image_generation``, ``local_shell``, …"""

    supported = ("function", "custom", "namespace")


AnyTool = Annotated[
    Annotated[ResponseTool, Tag("function[]")] | Annotated[CustomTool, Tag("custom[]")]
    | Annotated[NamespaceTool, Tag("namespace[]")] | Annotated[OtherResponseTool, Tag("other[]")],
    Discriminator(OtherResponseTool.tag)]
ResponseTools = Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


def seen_name(name: str, namespace: str | None) -> str:
    """What the model calls a tool."""
    if namespace in (None, DEFAULT_NAMESPACE):
        return name
    return f"{namespace}{'' if namespace.endswith('_') else '__'}{name}"


def client_tools(tools: Sequence[ResponseTool | CustomTool | NamespaceTool | OtherResponseTool],
                 place: str) -> Iterator[ClientTool]:
    """All that the model may call, those of namespaces among them. ``place``: where the request has them."""
    for number, tool in enumerate(tools):
        if isinstance(tool, NamespaceTool):
            for index, inner in enumerate(tool.tools):
                if not isinstance(inner, OtherNamespaceTool):
                    yield inner.client_tool(f"{place}[{number}].tools[{index}]", tool.name)
        elif not isinstance(tool, OtherResponseTool):
            yield tool.client_tool(f"{place}[{number}]")


def given_tools(tools: Sequence[ResponseTool | CustomTool | NamespaceTool | OtherResponseTool]) \
        -> list[dict[str, Any]]:
    """Tools as the answer repeats them: without those that are left out."""
    given = []
    for tool in tools:
        if isinstance(tool, OtherResponseTool):
            continue
        given.append(tool.model_dump())
        if isinstance(tool, NamespaceTool):
            given[-1]["tools"] = [inner.model_dump() for inner in tool.tools
                                  if not isinstance(inner, OtherNamespaceTool)]
    return given


class InputText:
    """The plain text of a custom tool's call, as its arguments come: ``{"input": "…"}``."""

    def __init__(self) -> None:
        self.text = ""
        self._arguments, self._position = "", -1

    def push(self, arguments: str) -> str:
        """More of the arguments; returns what is new of the text."""
        self._arguments += arguments
        if self._position < 0:
            begin = _BEGIN.match(self._arguments)
            if begin is None:
                return ""
            self._position = begin.end()
        pieces = []
        while piece := _PIECE.match(self._arguments, self._position):
            pieces.append(str(json.loads(f'"{piece[0]}"')))
            self._position = piece.end()
        new = _unicode("".join(pieces))
        self.text += new
        return new

    def finish(self) -> str:
        """What is still missing of the text, now that nothing follows."""
        text = _unicode(self._whole())
        if not text.startswith(self.text):  # the arguments aren't what the schema says
            return ""
        rest = text[len(self.text):]
        self.text = text
        return rest

    def _whole(self) -> str:
        try:
            arguments = parse_object((self._arguments or "{}").encode("utf-8", "replace"), "arguments",
                                     next="ask for more tokens")
        except SourceError:  # they are cut
            return self.text or ("" if self._position >= 0 else self._arguments)
        texts = [value for value in arguments.values() if isinstance(value, str)]
        text = arguments.get(INPUT, texts[0] if len(texts) == len(arguments) == 1 else self._arguments)
        return text if isinstance(text, str) else self._arguments


def input_text(arguments: str) -> str:
    """The plain text that complete arguments are."""
    text = InputText()
    text.push(arguments)
    text.finish()
    return text.text


def _unicode(text: str) -> str:
    # JSON can write half of a surrogate pair, which is no character and has no UTF-8
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


_BEGIN = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_PIECE = re.compile(r'[^"\\]+|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
                    r'|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
                    r'|\\u[0-9a-fA-F]{4}(?!$|\\$|\\u[0-9a-fA-F]{0,3}$|\\u[dD][c-fC-F])')
"""What can be read by itself: half of a surrogate pair waits for what follows."""
