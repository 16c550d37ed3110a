"""Gemma: ``call:name{key:<escape>text<escape>,number:1}`` between markers; what is written becomes JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from quantkit.structure.formats.scanner import TurnScanner

MAX_DEPTH = 64
"""Objects and lists within each other; deeper text counts as malformed."""
_WORD = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")


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
