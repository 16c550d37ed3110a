"""Hermes and Qwen: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, one pair of tags a call."""

from __future__ import annotations

from collections.abc import Callable, Collection

from quantkit.structure.formats.json_call import JsonCall
from quantkit.structure.formats.scanner import MAX_SPACE, TurnScanner

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesTurn(TurnScanner):
    """The parser of a turn in this format."""

    def __init__(self, names: Collection[str], reasoning: tuple[str, str] | None = None,
                 opened: bool = False) -> None:
        super().__init__(names, (OPEN,) if names else (), reasoning, opened)

    def _marked(self, mark: str) -> Callable[[str], None]:
        self._object = JsonCall(self._names)
        return self._call_text

    def _call_text(self, char: str) -> None:
        call = self._object
        if not self._head_grows(char):
            self._broken()
            return
        arguments = call.feed(char)
        if call.broken:
            if not self._begun:
                self._broken()
            else:  # the call is cut off; what follows is text
                self._raw, self._state = "", self._text
                self._again(char)
            return
        if call.name is not None and not self._begun:
            self._call(call.name)
        if arguments:
            self._arguments(arguments)
        if call.done:
            self._raw, self._state = "", self._close

    def _close(self, char: str) -> None:
        self._raw += char
        begun = self._raw.lstrip()
        if begun == CLOSE:
            self._raw, self._state = "", self._text
        elif not CLOSE.startswith(begun) or len(self._raw) > MAX_SPACE:
            raw, self._raw, self._state = self._raw, "", self._text
            self._again(raw)

    def _end(self) -> bool:
        if self._state == self._close and self._raw.strip():
            raw, self._raw, self._state = self._raw, "", self._text
            self._again(raw)
            return False
        return super()._end()
