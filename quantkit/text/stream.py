"""Decodes ids that arrive one at a time into text, without splitting a character."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

MAX_HELD = 32
"""Ids that may be held back; a character has four bytes, so more than that is no character."""
_BROKEN = "\ufffd"


class StreamDecoder:
    """Holds back what is not yet certain and puts out the rest at once.

    What a token looks like depends on the ones before it (a word's leading space, a byte of a
    character), so a token is decoded behind the tokens of the previous piece, and its text is what
    that adds. Cost a token: the length of two pieces, however long the text.

    Args:
        decode: ids → text; unfinished characters as U+FFFD.
        kept: texts of special tokens that ``decode`` leaves out and that are wanted nevertheless.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str],
                 kept: Mapping[int, str] = MappingProxyType({})) -> None:
        self._decode, self._kept = decode, kept
        self._context: list[int] = []  # the ids of the last piece
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """Add an id; returns the text that is now certain, often one word, sometimes nothing."""
        if token in self._kept:  # no character goes on behind it; the context stays, as decode skips it too
            return self._take(final=True) + self._kept[token]
        self._held.append(token)
        return self._take(final=len(self._held) > MAX_HELD)

    def finish(self) -> str:
        """What was held back; the decoder is then ready for another sequence."""
        out = self._take(final=True)
        self._context, self._held = [], []
        return out

    def _take(self, final: bool) -> str:
        before = self._decode(self._context)
        text = self._decode([*self._context, *self._held])
        fresh = text[len(before):]
        if not fresh or (fresh.endswith(_BROKEN) and not final):
            if final:  # tokens without text, of which there may be any number
                self._held = []
            return ""
        self._context, self._held = self._held, []
        return fresh
