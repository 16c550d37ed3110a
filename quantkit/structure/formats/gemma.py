"""Gemma: ``call:name{key:<escape>text<escape>,number:1}`` between markers; what is written becomes JSON."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.structure.formats.scanner import TurnScanner
from quantkit.structure.schemas import Fault, Path, children

MAX_DEPTH = 64
"""Objects and lists within each other; deeper text counts as malformed."""
_WORD = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_KNOWN = frozenset({"type", "properties", "required", "additionalProperties", "items", "minItems", "maxItems",
                    "enum", "const", "anyOf", "title", "description", "default", "examples", "nullable",
                    "$schema", "$comment"})
_MAX_ITEMS = 256
_ANY = r"/[^<{}\[\],]{1,200}/"
_NUMBERS = {"integer": "/-?(0|[1-9][0-9]{0,18})/",
            "number": r"/-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,3})?/"}


@dataclass(frozen=True)
class Marks:
    """The markers of one generation of the family.

    Attributes:
        open, close: around a call.
        quote: around a string.
    """

    open: str
    close: str
    quote: str


FUNCTION_GEMMA = Marks("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA4 = Marks("<|tool_call>", "<tool_call|>", '<|"|>')


class ArgumentsReader:
    """Reads arguments in this notation and writes them as JSON, from their ``{`` to their ``}``.

    Attributes:
        done, broken: whether they are complete, or malformed.
    """

    def __init__(self, quote: str) -> None:
        self.done = self.broken = False
        self._quote, self._open = quote, ""
        self._expects = "value"  # or "key", "colon", "string", "next"
        self._word = ""  # a key, word or end of a string so far
        self._is_key = self._fresh = False  # fresh: nothing stands in the innermost object or list yet

    def feed(self, char: str) -> str:
        """Read a character; returns the JSON that is certain now."""
        if self._expects == "string":
            return self._in_string(char)
        if self._word:
            return self._in_word(char)
        if char.isspace():
            return ""
        if self._expects == "colon":
            self._expects, self.broken = "value", char != ":"
            return ":" if char == ":" else ""
        if char in "{[" and self._expects == "value" and (self._open or char == "{"):
            self._open += char
            self._expects = "key" if char == "{" else "value"
            self.broken = len(self._open) > MAX_DEPTH
            self._fresh = True
            return char
        if char in "}]" and self._open[-1:] == {"}": "{", "]": "["}[char] and (
                self._expects == "next" or self._fresh):
            self._open = self._open[:-1]
            self._expects = "next"
            self._fresh = False
            self.done = not self._open
            return char
        if char == "," and self._expects == "next" and self._open:
            self._expects, self._fresh = "key" if self._open[-1] == "{" else "value", False
            return ","
        if self._expects in ("key", "value") and self._open and char not in "}],:":
            self._word, self._fresh = char, False
            return ""
        self.broken = True
        return ""

    def _in_word(self, char: str) -> str:
        self._word += char
        if self._word == self._quote:
            self._is_key = self._expects == "key"
            self._word, self._expects = "", "string"
            return '"'
        if self._quote.startswith(self._word):
            return ""
        if self._expects == "key":
            if char != ":":
                self.broken = char in "{}[]," or len(self._word) > 1000
                return ""
            key = self._word[:-1].strip()
            self._word = ""
            self._expects = "value"
            return json.dumps(key) + ":"
        if char not in ",}]":
            self.broken = char in "{[" or len(self._word) > 1000
            return ""
        word = self._word[:-1].strip()
        self._word = ""
        self._expects = "next"
        text = word if _WORD.fullmatch(word) else json.dumps(word)
        return text + self.feed(char)

    def _in_string(self, char: str) -> str:
        self._word += char
        if self._word.endswith(self._quote):
            text = self._word[:-len(self._quote)]
            self._word, self._expects = "", "colon" if self._is_key else "next"
            return json.dumps(text)[1:-1] + '"'
        kept = max((size for size in range(1, len(self._quote)) if self._word.endswith(self._quote[:size])),
                   default=0)
        text, self._word = self._word[:len(self._word) - kept], self._word[len(self._word) - kept:]
        return json.dumps(text)[1:-1]


class GemmaTurn(TurnScanner):
    """The parser of a turn in this format."""

    def __init__(self, names: Collection[str], marks: Marks, reasoning: tuple[str, str] | None = None,
                 opened: bool = False) -> None:
        self._format = marks
        super().__init__(names, (marks.open,) if names else (), reasoning, opened, close=marks.close)

    def _marked(self, mark: str) -> Callable[[str], None]:
        self._head = ""
        return self._name

    def _name(self, char: str) -> None:
        self._raw += char
        if char == "{":
            word, _, name = self._head.strip().partition(":")
            if word != "call" or name not in self._names:
                self._broken()
                return
            self._call(name)
            self._reader, self._state = ArgumentsReader(self._format.quote), self._arguments_text
            self._arguments_text(char)
            return
        self._head += char
        if len(self._head) > 256 or not "call:".startswith(self._head.lstrip()[:5]):
            self._broken()

    def _arguments_text(self, char: str) -> None:
        if text := self._reader.feed(char):
            self._arguments(text)
        if self._reader.broken:
            self._read_as_text(char)
        elif self._reader.done:
            self._raw, self._state = "", self._closing


def widened(schema: Any) -> tuple[Any, list[Fault]]:
    """A schema without what has no rule in this notation, and what that was."""
    schema = copy.deepcopy(schema)
    faults: list[Fault] = []
    waiting: list[tuple[Path, Any]] = [((), schema)]
    while waiting:
        path, node = waiting.pop()
        if not isinstance(node, dict):
            continue
        for key in [key for key in node if key not in _KNOWN]:
            del node[key]
            faults.append(Fault((*path, key), "the model's notation of calls has no rule for this keyword"))
        for key in ("const", "enum"):
            values = node.get(key) if key == "enum" else [node.get(key)]
            if isinstance(values, list) and any(isinstance(value, dict | list) for value in values):
                del node[key]
                faults.append(Fault((*path, key), "the model's notation has no lists or objects here"))
        properties = node.get("properties") or {}
        # names that no notation without quotes can spell would be read as something else
        for name in [name for name in properties if not re.fullmatch(r"[^\s<>{}\[\],:\"]+", name)]:
            del properties[name]
            faults.append(Fault((*path, "properties", name), "the model's notation of calls can't spell it"))
        if isinstance(required := node.get("required"), list):
            node["required"] = [name for name in required if name in properties]
        waiting += [((*path, *place), part) for place, part in children(node)]
    return schema, faults


class ArgumentsGrammar:
    """Writes the arguments of tools.

    Args:
        quote: the grammar's literal for what stands around a string.
        special: whether that is a special token, which no text can contain.
    """

    def __init__(self, quote: str, special: bool) -> None:
        self._quote = quote
        self._text = r"/(.|\n){0,4000}/" if special else r"/[^<]{0,4000}/"

    def object(self, schema: Mapping[str, Any]) -> str:
        """An expression for an object of a JSON schema, from which :func:`widened` took what has no rule."""
        properties = schema.get("properties") or {}
        required = set(schema.get("required") or ())
        names = sorted(properties)  # as the model's template writes them
        fields = {name: f"{json.dumps(name + ':')} {self._value(properties[name])}" for name in names}
        first = next((number for number, name in enumerate(names) if name in required), None)
        if first is None:
            starts = [f"{fields[name]} " + self._more(names[number + 1:], fields, required)
                      for number, name in enumerate(names)]
            body = f"({' | '.join(starts)})?" if starts else ""
        else:
            before = " ".join(f'({fields[name]} ",")?' for name in names[:first])
            body = f"{before} {fields[names[first]]} {self._more(names[first + 1:], fields, required)}"
        return f'"{{" {body} "}}"'

    def _more(self, names: list[str], fields: Mapping[str, str], required: set[str]) -> str:
        return " ".join(f'("," {fields[name]}){"" if name in required else "?"}' for name in names)

    def _value(self, schema: Any) -> str:
        if not isinstance(schema, Mapping):
            return self._anything()
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return "(" + " | ".join(self._constant(value) for value in values) + ")"
        if "anyOf" in schema:
            return "(" + " | ".join(self._value(branch) for branch in schema["anyOf"]) + ")"
        kinds = schema.get("type")
        kinds = list(kinds) if isinstance(kinds, list) else [kinds]
        if schema.get("nullable"):
            kinds.append("null")
        return "(" + " | ".join(self._kind(kind, schema) for kind in kinds) + ")"

    def _kind(self, kind: Any, schema: Mapping[str, Any]) -> str:
        if kind == "string":
            return f"{self._quote} {self._text} {self._quote}"
        if kind in _NUMBERS:
            return _NUMBERS[kind]
        if kind == "boolean":
            return '"true" | "false"'
        if kind == "null":
            return '"null"'
        if kind == "array":
            item = self._value(schema.get("items"))
            low, high = (_count(schema.get(key), default) for key, default in (("minItems", 0),
                                                                               ("maxItems", _MAX_ITEMS)))
            if high == 0:
                return '"[" "]"'
            items = f'{item} ("," {item}){{{max(low - 1, 0)},{max(low, high) - 1}}}'
            return f'"[" {items} "]"' if low else f'"[" ({items})? "]"'
        if kind == "object" and schema.get("properties"):
            return self.object(schema)
        return self._anything()

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._quote} {json.dumps(value)} {self._quote}"
        return json.dumps(json.dumps(value))

    def _anything(self) -> str:
        """A value that the schema says nothing about: one that isn't nested."""
        return f"({self._quote} {self._text} {self._quote} | {_ANY})"


def _count(value: Any, default: int) -> int:
    return min(int(value), _MAX_ITEMS) if isinstance(value, int | float) and value >= 0 else default
