"""Calls as JSON objects, ``{"name": …, "arguments": {…}}``, whose arguments come as they are written."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any

from quantkit.structure.formats.scanner import TurnScanner
from quantkit.structure.json_scanner import JsonScanner

ARGUMENTS = ("arguments", "parameters", "input")


class JsonCall:
    """Reads one call.

    Args:
        names: the names of the tools that can be called.

    Attributes:
        name: the tool's name, once the call has begun: its name is known, and where its arguments begin.
        done: whether the object is complete.
        broken: whether it is no call, or stopped being one.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.name: str | None = None
        self.done = self.broken = False
        self._names, self._scanner = names, JsonScanner()
        self._parts: list[str] = []  # what came, until it is known to be a call
        self._named: str | None = None
        self._streams = False

    def feed(self, char: str) -> str:
        """Read a character; returns what it adds to the arguments."""
        scanner, before = self._scanner, self._scanner.depth
        if self.name is None:
            self._parts.append(char)
        if not scanner.feed(char):
            self.broken = True
            return ""
        if self._streams:
            self._streams = scanner.depth > 1
            return char
        if scanner.ended_value and scanner.depth == 1 and scanner.key == "name":
            self._named = scanner.string
        if (before == 1 and scanner.depth == 2 and char == "{" and scanner.key in ARGUMENTS
                and self.name is None and decoded(self._named) in self._names):
            self.name, self._streams = decoded(self._named), True
            return char
        if scanner.done:
            self.done = True
            return self._whole()
        return ""

    def _whole(self) -> str:
        """The arguments of a complete object, if they didn't come as they were written."""
        if self.name is not None:
            return ""
        call: dict[str, Any] = json.loads("".join(self._parts))
        if isinstance(call.get("function"), dict):  # as in OpenAI's messages
            call = call["function"]
        name = call.get("name")
        arguments: Any = next((call[key] for key in ARGUMENTS if key in call), {})
        if isinstance(arguments, str):  # JSON within JSON, as in OpenAI's messages
            arguments = read_json(arguments)
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            self.broken = True
            return ""
        self.name = name
        return json.dumps(arguments)  # all ASCII: there may be halves of surrogate pairs in it


class CallScanner(TurnScanner, ABC):
    """Reads a call's object; a format says what may stand around it."""

    _object: JsonCall

    @abstractmethod
    def _after_call(self) -> Callable[[str], None]:
        """The state behind a complete call."""

    def _begin_call(self, char: str = "") -> None:
        """A call's object begins, perhaps with ``char``."""
        self._object = JsonCall(self._names)
        self._state = self._call_text
        self._begun = False
        if char:
            self._object.feed(char)

    def _call_text(self, char: str) -> None:
        call = self._object
        if not self._head_grows(char):
            self._broken()
            return
        arguments = call.feed(char)
        if call.broken:
            self._cut(char)
            return
        if call.name is not None and not self._begun:
            self._call(call.name)
        if arguments:
            self._arguments(arguments)
        if call.done:
            self._raw, self._state = "", self._after_call()

    def _cut(self, char: str) -> None:
        """What is read isn't a call, or stops being one: then what follows is text."""
        if not self._begun:
            self._broken()
        else:
            self._read_as_text(char)


def read_json(text: str) -> Any:
    """The value that JSON means; ``None`` also if it is malformed."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def decoded(string: str | None) -> str | None:
    """The content of a JSON string."""
    return None if string is None else str(json.loads(f'"{string}"'))


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
