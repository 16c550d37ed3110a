"""Writes grammars in llguidance's Lark: what an answer must be, and calls as each family writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quantkit.structure.formats.gemma import ArgumentsGrammar
from quantkit.structure.formats.hermes import CLOSE, OPEN
from quantkit.structure.formats.mistral import ARGS, CALL_ID
from quantkit.structure.formats.mistral import OPEN as TOOL_CALLS
from quantkit.structure.schemas import rebased
from quantkit.structure.turns import Tool, TurnFormat, gemma_marks

MAX_CALLS = 16
"""In one turn that must have calls."""
WHITE_SPACE = r"\r?\n[ \t]{0,40}|[ \t]{1,4}"
"""Between the parts of JSON: a line break with its indentation, or a few spaces; never without end."""
_ANY_TEXT = r"/(.|\n)*/"


class LarkWriter:
    """Writes grammars for one model. The schemas of tools must be those of objects that llguidance, or for
    Gemma :mod:`quantkit.structure.formats.gemma`, keeps as they are.

    Args:
        special: ids of the tokens that no text contains: a grammar must name them by their ids.
    """

    def __init__(self, format: TurnFormat, special: Mapping[str, int]) -> None:
        self._format, self._special = format, special
        marks = [mark for mark in format.marks if mark in special]
        self._marks = re.compile("(" + "|".join(map(re.escape, sorted(marks, key=len, reverse=True))) + ")") \
            if marks else None

    def literal(self, text: str) -> str:
        """A text that must come just so, special tokens in it as such."""
        parts = self._marks.split(text) if self._marks else [text]
        return " ".join(f"<[{self._special[part]}]>" if part in self._special and self._marks
                        else json.dumps(part) for part in parts if part)

    def reasoning(self, opened: bool) -> str:
        """Rules of ``reasoning``, which the turn may begin with, or has begun with already."""
        assert self._format.reasoning is not None
        begin, end = self._format.reasoning
        named = "thoughts" if end in self._special else "thoughts[lazy]"
        return (f"reasoning: {'' if opened else self.literal(begin)} thoughts /\\n{{0,2}}/\n"
                f"{named}: {_ANY_TEXT} {self.literal(end)}\n")

    def turn(self, tools: Sequence[Tool], choice: str, parallel: bool) -> str:
        """Rules of ``answer``: calls if they are required, text and calls where ``choice`` is ``auto``."""
        if choice not in ("auto", "required"):
            tools, parallel = [tool for tool in tools if tool.name == choice], False
        rules = [f"arguments_{number}: {self._arguments(tool)}" for number, tool in enumerate(tools)]
        write = {"hermes": self._hermes, "mistral": self._mistral, "gemma": self._gemma}.get(
            self._format.name, self._json)
        return "\n".join([*write(tools, choice == "auto", parallel), *rules]) + "\n"

    def turn_or_answer(self, tools: Sequence[Tool], parallel: bool) -> str:
        """Rules of ``answer``, which is calls, where other rules of a grammar may be JSON too: where calls
        are JSON, they are written by a schema, because a text that must come just so would hide other JSON
        that begins in the same way from the parser."""
        if self._format.name not in ("json", "llama3"):
            return self.turn(tools, "required", parallel)
        key = "parameters" if self._format.name == "llama3" else "arguments"
        calls = []
        for tool in tools:
            calls.append(schema_text({
                "type": "object", "required": ["name", key], "additionalProperties": False, "properties": {
                    "name": {"const": tool.name}, key: rebased(tool.parameters, f"#/properties/{key}")}}))
        return "answer: " + "\n    | ".join(f"%json {call}" for call in calls) + "\n"

    def _arguments(self, tool: Tool) -> str:
        if self._format.name == "gemma":
            quote = gemma_marks(self._format).quote
            return ArgumentsGrammar(self.literal(quote), quote in self._special).object(tool.parameters)
        return "%json " + schema_text(tool.parameters)

    def _calls(self, tools: Sequence[Tool], write: Callable[[Tool, str], str]) -> str:
        return "call: " + "\n    | ".join(write(tool, f"arguments_{number}")
                                           for number, tool in enumerate(tools))

    def _object(self, key: str) -> Callable[[Tool, str], str]:
        def write(tool: Tool, rule: str) -> str:
            begin = f'{{"name": {json.dumps(tool.name)}, "{key}": '
            return f'{json.dumps(begin)} {rule} "}}"'

        return write

    def _hermes(self, tools: Sequence[Tool], auto: bool, parallel: bool) -> list[str]:
        body = self._calls(tools, self._object("arguments"))
        opened, close = self.literal(OPEN), self.literal(CLOSE)
        if auto:
            return [*self._free(OPEN, f'"\\n"? call "\\n"? {close}'), body]
        more = f'("\\n" whole){{0,{MAX_CALLS - 1}}}' if parallel else ""
        return [f"answer: whole {more}", f'whole: {opened} "\\n" call "\\n" {close}', body]

    def _mistral(self, tools: Sequence[Tool], auto: bool, parallel: bool) -> list[str]:
        if self._format.variant == "list":
            body = self._calls(tools, self._object("arguments"))
            more = f'(", " call){{0,{MAX_CALLS - 1}}}' if parallel else ""
            rest = f'"[" call {more} "]"'
        else:
            between = self.literal(ARGS)
            if self._format.variant == "call_id":
                between = f"{self.literal(CALL_ID)} /[a-zA-Z0-9]{{9}}/ {between}"
            body = self._calls(tools, lambda tool, rule: f"{json.dumps(tool.name)} {between} {rule}")
            rest = "call"
        if auto:
            return [*self._free(TOOL_CALLS, rest), body]
        several = parallel and self._format.variant != "list"
        return [f"answer: whole{{1,{MAX_CALLS if several else 1}}}",
                f"whole: {self.literal(TOOL_CALLS)} {rest}", body]

    def _gemma(self, tools: Sequence[Tool], auto: bool, parallel: bool) -> list[str]:
        marks = gemma_marks(self._format)
        body = self._calls(tools, lambda tool, rule: f"{json.dumps('call:' + tool.name)} {rule}")
        rest = f"call {self.literal(marks.close)}"
        if auto:
            return [*self._free(marks.open, rest), body]
        return [f"answer: whole{{1,{MAX_CALLS if parallel else 1}}}",
                f"whole: {self.literal(marks.open)} {rest}", body]

    def _json(self, tools: Sequence[Tool], auto: bool, parallel: bool) -> list[str]:
        llama = self._format.name == "llama3"
        body = self._calls(tools, self._object("parameters" if llama else "arguments"))
        calls = "call"
        if parallel and not llama:  # Llama 3's template takes one call a turn
            calls = f'call | "[" call (", " call){{1,{MAX_CALLS - 1}}} "]"'
        if auto:
            return [f"answer: TEXT | {calls}", r"TEXT: /(\s*[^\s{\[](.|\n)*)?/", body]
        return [f"answer: {calls}", body]

    def _free(self, mark: str, rest: str) -> list[str]:
        """Text in which the marker begins what must then follow."""
        head = f"{_ANY_TEXT} {self.literal(mark)}"
        named = "head" if mark in self._special else "head[lazy]"
        return ["answer: whole* tail", f"tail: {_ANY_TEXT}", f"whole: head {rest}", f"{named}: {head}"]


def schema_text(schema: Mapping[str, Any] | bool) -> str:
    """A JSON schema with llguidance's options in it, on one line."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return json.dumps({"x-guidance": {"whitespace_pattern": WHITE_SPACE}, **schema})


def regex_literal(regex: str) -> str:
    """A regular expression between slashes."""
    return "/" + re.sub(r"\\.|/", lambda match: r"\/" if match[0] == "/" else match[0], regex,
                        flags=re.DOTALL).replace("\n", r"\n") + "/"
