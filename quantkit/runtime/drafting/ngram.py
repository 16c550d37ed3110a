"""Drafts from the text itself: what followed the last time that the same tokens came.

Prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, model_validator

from quantkit.runtime.drafting.base import MAX_DRAFT, DraftedText, Drafter, DraftSource

if TYPE_CHECKING:
    from quantkit.runtime.loader import LoadedModel


AT_ONCE = 4096
"""Tokens whose runs are noted between two steps, at most."""


class NgramDrafter(Drafter):
    """Takes what followed the latest earlier occurrence of the text's last tokens, of the longest such run.

    Attributes:
        max_match: tokens at the text's end that are looked for, at first.
        min_match: and at last.
    """

    name: ClassVar[str] = "ngram"
    max_tokens: int = Field(default=12, ge=1, le=MAX_DRAFT)
    max_match: int = Field(default=8, ge=1, le=16)
    min_match: int = Field(default=3, ge=1, le=16)

    @model_validator(mode="after")
    def _ordered(self) -> NgramDrafter:
        if self.min_match > self.max_match:
            raise ValueError(f"min_match {self.min_match} is more than max_match {self.max_match}")
        return self

    def start(self, target: LoadedModel) -> DraftSource:
        return _Lookup(self.min_match, self.max_match)


class _Index:
    """Where each run of tokens ends in a text: by its tokens, the place behind its latest occurrence.

    Args:
        sizes: lengths of runs.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._places: dict[tuple[int, ...], int] = {}
        self._end = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Note all runs that something follows; of a long text some more each time."""
        last = min(len(tokens), self._end + 1 + AT_ONCE)
        for end in range(self._end + 1, last):
            for size in self._sizes:
                if size <= end:
                    self._places[tuple(tokens[end - size:end])] = end
        self._end = max(self._end, last - 1)

    def following(self, tokens: Sequence[int]) -> int | None:
        """Where it goes on behind the latest earlier occurrence of the text's end, the longest run first."""
        for size in self._sizes:
            if size < len(tokens) and (place := self._places.get(tuple(tokens[-size:]))) is not None:
                return place
        return None


class _Lookup(DraftSource):
    def __init__(self, smallest: int, largest: int) -> None:
        self._sizes = range(largest, smallest - 1, -1)

    def begin(self, text: DraftedText) -> None:
        text.state = _Index(self._sizes)

    def propose(self, texts: Sequence[DraftedText], limits: Sequence[int]) -> list[list[int]]:
        """A repetition that reaches the text's end goes on from its beginning."""
        drafts = []
        for text, limit in zip(texts, limits):
            index, tokens = text.state, text.tokens
            assert isinstance(index, _Index)
            index.extend(tokens)
            draft: list[int] = []
            if (place := index.following(tokens)) is not None:
                period = len(tokens) - place
                draft = [tokens[place + i % period] for i in range(limit)]
            drafts.append(draft)
        return drafts
