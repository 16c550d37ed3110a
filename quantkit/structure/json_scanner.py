"""JSON that arrives one character at a time: whether it can still become an object, and where it ends."""

from __future__ import annotations

import re

MAX_DEPTH = 64
"""Objects and lists within each other; deeper text counts as malformed."""
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_LITERALS = ("true", "false", "null")
_SPACE, _HEX = frozenset(" \t\n\r"), frozenset("0123456789abcdefABCDEF")


class JsonScanner:
    """Reads one JSON object.

    Attributes:
        depth: objects and lists that are open.
        done: whether the object is complete.
        key: the key of the outermost object whose value is being read.
        string: content of the last string, as it is written.
        ended_value: whether the last character ended a string that is a value.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.done = False
        self.key = ""
        self.string = ""
        self.ended_value = False
        self._open = ""  # "{" and "[" of what is open
        self._expects = "object"
        self._word = ""  # a number or literal so far
        self._escaped, self._hex = False, 0  # within a string: behind a backslash, in the four digits of \\u

    def feed(self, char: str) -> bool:
        """Read a character; returns whether it may follow. Nothing may follow one that may not."""
        self.ended_value = False
        if self._expects in ("key string", "value string"):
            return self._in_string(char)
        if self._word:
            if char not in " \t\n\r,]}":
                self._word += char
                return len(self._word) <= 1000 and (self._word[0] in "-0123456789" or any(
                    literal.startswith(self._word) for literal in _LITERALS))
            if self._word not in _LITERALS and not _NUMBER.fullmatch(self._word):
                return False
            self._word, self._expects = "", "next"
        if char in _SPACE:
            return True
        return not self.done and self._structure(char)

    def _structure(self, char: str) -> bool:
        expects = self._expects
        if expects == "colon":
            self._expects = "value"
            return char == ":"
        if char == '"' and expects in ("key", "key or end", "value", "value or end"):
            self._expects, self.string = "key string" if "key" in expects else "value string", ""
            return True
        if char == "," and expects == "next":
            self._expects = "key" if self._open[-1] == "{" else "value"
            return True
        if char == "}" and expects in ("next", "key or end"):
            return self._close("{")
        if char == "]" and expects in ("next", "value or end"):
            return self._close("[")
        if expects not in ("object", "value", "value or end"):
            return False
        if char == "{" or (char == "[" and expects != "object"):
            self._open += char
            self.depth += 1
            self._expects = "key or end" if char == "{" else "value or end"
            return self.depth <= MAX_DEPTH
        self._word = char
        return expects != "object" and char in "-0123456789tfn"

    def _close(self, kind: str) -> bool:
        if self._open[-1] != kind:
            return False
        self._open, self._expects = self._open[:-1], "next"
        self.depth -= 1
        self.done = self.depth == 0
        return True

    def _in_string(self, char: str) -> bool:
        if self._hex:
            self._hex -= 1
            self.string += char
            return char in _HEX
        if self._escaped:
            self._escaped, self._hex = False, 4 if char == "u" else 0
            self.string += char
            return char in '"\\/bfnrtu'
        if char == '"':
            if self._expects == "key string":
                self._expects = "colon"
                if self.depth == 1:
                    self.key = self.string
            else:
                self._expects, self.ended_value = "next", True
            return True
        self.string += char
        self._escaped = char == "\\"
        return char >= " "
