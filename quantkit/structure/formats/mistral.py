"""Mistral: ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``; newer models ``[TOOL_CALLS]name[ARGS]{…}``."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Collection

from quantkit.structure.formats.json_call import CallScanner
from quantkit.structure.formats.scanner import MAX_SPACE
from quantkit.structure.json_scanner import JsonScanner

OPEN = "[TOOL_CALLS]"
ARGS = "[ARGS]"
CALL_ID = "[CALL_ID]"
ID_LENGTH = 9
"""Characters of a call's id; the templates refuse others."""
_ALPHABET = string.ascii_letters + string.digits


class MistralTurn(CallScanner):
    """The parser of a turn in either format."""

    def __init__(self, names: Collection[str], reasoning: tuple[str, str] | None = None,
                 opened: bool = False) -> None:
        super().__init__(names, (OPEN,) if names else (), reasoning, opened)

    def new_call_id(self) -> str:
        """An id as the templates want it."""
        return "".join(secrets.choice(_ALPHABET) for _ in range(ID_LENGTH))

    def _marked(self, mark: str) -> Callable[[str], None]:
        self._listed = False
        self._name = ""
        return self._lead

    def _lead(self, char: str) -> None:
        """Behind the marker: a list, an object, or a name."""
        self._raw += char
        if char.isspace():
            return
        if char == "[":
            if self._listed:
                self._broken()
            self._listed = True
        elif char == "{":
            self._begin_call(char)
        else:
            self._state = self._named
            self._name = char
            if self._listed:
                self._broken()

    def _after_call(self) -> Callable[[str], None]:
        return self._between if self._listed else self._text

    def _between(self, char: str) -> None:
        """Behind an object of a list."""
        self._raw += char
        if char == "{":
            self._begin_call(char)
        elif char == "]":
            self._raw, self._state = "", self._text
        elif (not char.isspace() and char != ",") or len(self._raw) > MAX_SPACE:
            self._read_as_text(self._raw.lstrip(", \t\r\n"))

    def _named(self, char: str) -> None:
        """A name, up to its arguments."""
        self._raw += char
        if char == "{":
            name = self._name.removesuffix(ARGS).partition(CALL_ID)[0].strip()
            if name not in self._names:
                self._broken()
                return
            self._call(name)
            self._scanner, self._state = JsonScanner(), self._arguments_text
            self._arguments_text(char)
            return
        self._name += char
        if len(self._name) > 256 or char == "\n":
            self._broken()

    def _arguments_text(self, char: str) -> None:
        if not self._scanner.feed(char):
            self._cut(char)
            return
        self._arguments(char)
        if self._scanner.done:
            self._raw, self._state = "", self._text
