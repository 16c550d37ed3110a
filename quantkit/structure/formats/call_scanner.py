"""What the parsers share whose calls are JSON objects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from quantkit.structure.formats.json_call import JsonCall
from quantkit.structure.formats.scanner import TurnScanner


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
            self._raw, self._state = "", self._text
            self._again(char)
