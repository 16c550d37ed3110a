"""Calls as plain JSON that is the turn: Llama 3 and models without a format of their own.

One object ``{"name": …, "parameters": {…}}`` or several (separated by ``;``, a comma or white space, or in a
list), perhaps behind Llama 3's ``<|python_tag|>``, perhaps in a fence of Markdown.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from quantkit.structure.formats.json_call import CallScanner
from quantkit.structure.formats.scanner import MAX_SPACE

PYTHON_TAG = "<|python_tag|>"
_FENCES = ("```json\n", "```\n", "```json", "```")


class JsonTurn(CallScanner):
    """The parser of a turn in this format.

    Args:
        names: the names of the tools that can be called.
        marks: texts that announce calls where they aren't the beginning of the turn.
        reasoning, opened: as the scanner's.
    """

    def __init__(self, names: Collection[str], marks: tuple[str, ...] = (),
                 reasoning: tuple[str, str] | None = None, opened: bool = False) -> None:
        self._tools = bool(names)
        self._fenced = self._listed = False
        super().__init__(names, marks if names else (), reasoning, opened)

    def _answer(self) -> Callable[[str], None]:
        return self._lead if self._tools else self._text

    def _marked(self, mark: str) -> Callable[[str], None]:
        return self._lead

    def _lead(self, char: str) -> None:
        """Where a call may begin: what may stand before it."""
        self._raw += char
        if len(self._raw) > MAX_SPACE:
            self._listed = False
            self._broken()
            return
        begun = self._raw.strip(" \t\r\n") if not self._raw.strip() else self._raw.lstrip()
        for mark in self._marks:
            if begun.startswith(mark):
                begun = begun[len(mark):].lstrip()
        if not begun or any(mark.startswith(begun) for mark in self._marks):
            return
        if begun in _FENCES or any(fence.startswith(begun) for fence in _FENCES):
            return
        fenced = begun.startswith("```")
        if fenced:
            begun = begun.removeprefix("```").removeprefix("json").lstrip()
        if begun == "[":
            self._fenced, self._listed = fenced, True
        elif begun in ("{", "[{") or (self._listed and begun[-1] == "{" and begun[1:-1].isspace()):
            self._fenced = fenced
            self._begin_call(char)
        elif begun and not (self._listed and begun[1:].isspace()):
            self._listed = False
            self._broken()

    def _after_call(self) -> Callable[[str], None]:
        return self._between

    def _between(self, char: str) -> None:
        """Behind a call: another one, the end of the list or fence, or text."""
        self._raw += char
        begun = self._raw.strip()
        if self._listed:
            begun = begun.removeprefix("]").lstrip()
        if self._fenced:
            begun = begun.removeprefix("```").lstrip()
        begun = begun.lstrip(",; \t\r\n")
        marks = (*self._marks, *(("```",) if self._fenced else ()))
        if begun == "{":
            self._begin_call(char)
        elif begun in self._marks:
            self._state = self._lead
            self._fenced = self._listed = False
            self._begun = False
        elif (begun and not any(mark.startswith(begun) for mark in marks)) or len(self._raw) > MAX_SPACE:
            self._read_as_text(begun or self._raw)

    def _end(self) -> bool:
        if self._state == self._between and self._raw.strip(" \t\r\n,;]`"):
            self._read_as_text(self._raw)
            return False
        return super()._end()
