"""The text in which facts are hidden: sentences of a given text, or generated ones."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from quantkit.support.errors import UsageError
from quantkit.text.tokenizer import Tokenizer

LETTERS = 8
"""Characters a token at most, over a whole text: so much must follow a sentence that hay begins with."""
LONGEST = 800
"""Characters of a sentence; a longer one is cut between words, or wherever it must be."""
_END = re.compile(r"""
    (?: (?<!\bMr) (?<!\bMrs) (?<!\bMs) (?<!\bDr) (?<!\bSt) (?<!\b[A-HJ-ZА-Я]) \.  |  [!?…] )
    ["'”’“«»)\]]* \s+  |  [。！？]+ [」』”’）]* \s*""", re.VERBOSE)
_WHO = ("The baker", "A gardener", "The old sailor", "My neighbor", "The teacher", "A young painter",
        "The clerk", "Her cousin", "The farmer", "A tall stranger", "The postman", "Their uncle")
_DID = ("walked along", "looked across", "waited beside", "swept", "sketched", "remembered", "crossed",
        "returned to", "talked about", "drove past", "photographed", "slept near")
_WHAT = ("the river", "the market", "an empty road", "the stone bridge", "the harbour", "a quiet field",
         "the railway station", "the library", "a wooden fence", "the hill", "the village square", "the mill")
_WHEN = ("in the morning", "after lunch", "before the rain", "on a warm evening", "while it was snowing",
         "as usual", "without a word", "for the second time", "at noon", "when the bells rang")


class Haystack(Protocol):
    """Where sentences come from.

    Attributes:
        name: for the report.
    """

    name: str

    def sentences(self, chance: random.Random, tokens: int) -> Iterator[str]:
        """Sentences from a place that ``chance`` draws, enough for ``tokens`` tokens if there are as many."""


class TextHaystack:
    """Sentences of a text, in order, from a random one on; white space becomes single spaces.

    Args:
        name: the name of the text.
        content: the text itself.
    """

    def __init__(self, name: str, content: str) -> None:
        self.name = name
        self._sentences = list(_pieces(" ".join(content.split())))
        self._left = [0] * (len(self._sentences) + 1)
        for index in reversed(range(len(self._sentences))):
            self._left[index] = self._left[index + 1] + len(self._sentences[index])

    def sentences(self, chance: random.Random, tokens: int) -> Iterator[str]:
        starts = sum(remaining >= LETTERS * tokens for remaining in self._left)
        yield from self._sentences[chance.randrange(max(1, starts)):]


def _pieces(text: str) -> Iterator[str]:
    """Sentences with the quotation marks and brackets that close them; parts of those that are too long."""
    start = 0
    for end in (*(match.end() for match in _END.finditer(text)), len(text)):
        while len(text[start:end].strip()) > LONGEST:
            space = text.rfind(" ", start + 1, start + LONGEST)
            stop = start + LONGEST if space < 0 else space
            yield text[start:stop].strip()
            start = stop
        if sentence := text[start:end].strip():
            yield sentence
        start = end


class FillerHaystack:
    """Generated sentences without end: nothing in them is a name, a number or a secret."""

    name = "filler"

    def sentences(self, chance: random.Random, tokens: int) -> Iterator[str]:
        while True:
            yield " ".join(chance.choice(part) for part in (_WHO, _DID, _WHAT, _WHEN)) + "."


@dataclass(frozen=True)
class HaystackTokens:
    """Hay in tokens.

    Attributes:
        ids: exactly the tokens that were asked for; the last sentence may be cut.
        starts: the places at which sentences begin, the first at 0.
    """

    ids: tuple[int, ...]
    starts: tuple[int, ...]


def fill_haystack(hay: Haystack, tokenizer: Tokenizer, tokens: int, chance: random.Random) -> HaystackTokens:
    """Exactly the given number of tokens of text, counted by the model's tokenizer.

    Args:
        hay: the source of sentences.
        tokenizer: the model's. Sentences are encoded one by one, each behind a space, so that what is put
            between two of them changes no token of theirs.
        tokens: at least 1.
        chance: draws the place.

    Raises:
        UsageError: the text is too short.
    """
    ids: list[int] = []
    starts: list[int] = []
    for sentence in hay.sentences(chance, tokens):
        starts.append(len(ids))
        ids += tokenizer.encode(f" {sentence}", special=False, parse_special=False)
        if len(ids) >= tokens:
            return HaystackTokens(tuple(ids[:tokens]), tuple(starts))
    raise UsageError(f"the text {hay.name} has {len(ids)} tokens, {tokens} are needed",
                     next="give a longer --text, smaller --context, or --filler")
