"""Hermes and Qwen: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, one pair of tags a call."""

from __future__ import annotations

from collections.abc import Callable, Collection

from quantkit.structure.formats.json_call import CallScanner

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesTurn(CallScanner):
    """The parser of a turn in this format."""

    def __init__(self, names: Collection[str], reasoning: tuple[str, str] | None = None,
                 opened: bool = False) -> None:
        super().__init__(names, (OPEN,) if names else (), reasoning, opened, close=CLOSE)

    def _marked(self, mark: str) -> Callable[[str], None]:
        self._begin_call()
        return self._call_text

    def _after_call(self) -> Callable[[str], None]:
        return self._closing
