"""A text token by token, shaded by how differently two variants see it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from quantkit.evaluation.report.base import TextGrid, number, text_name
from quantkit.evaluation.result import TokenDiff

LIMITS = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Nats from which on a token is shaded more."""
_TOKENS, _LISTED = 3000, 20


@dataclass(frozen=True)
class ShadedToken:
    """A token on the page.

    Attributes:
        text: the token as text.
        level: the level of shading, from 0 to the number of :data:`LIMITS`.
        differs: whether the two find different tokens likeliest here.
        note: a sentence about it.
    """

    text: str
    level: int
    differs: bool
    note: str


@dataclass(frozen=True)
class ShadedText:
    """A text on the page, and the limits of its shades."""

    tokens: tuple[ShadedToken, ...]
    limits: tuple[str, ...] = tuple(f"{limit:g}" for limit in LIMITS)


def shaded(diff: TokenDiff) -> ShadedText:
    """The text's first 3,000 tokens."""
    return ShadedText(tuple(
        ShadedToken(visible(token), sum(value >= limit for limit in LIMITS), expected is not None,
                    f"{quoted(token)}: KL {number(value)}, loss {number(loss)} nats above the reference's"
                    + (f"; the reference expects {quoted(expected[0])}, the variant {quoted(expected[1])}"
                       if expected else ""))
        for token, value, loss, expected in list(zip(diff.tokens, diff.kl, diff.loss,
                                   diff.expected))[:_TOKENS]))


def summary(diff: TokenDiff) -> list[str]:
    """What is compared, and how much of it differs."""
    count = len(diff.tokens)
    differs = sum(expected is not None for expected in diff.expected)
    texts = [f"The text is {text_name(diff.text)}: {diff.candidate} against "
             f"{diff.reference}. At {differs} of {count} "
             "tokens another one is the likeliest; these are underlined. The stronger the shade, the larger "
             "the KL."]
    return texts + [f"The first {_TOKENS:,} tokens are shown."] * (count > _TOKENS)


def largest(diff: TokenDiff) -> TextGrid | None:
    """Where the two differ most, as a table."""
    places = [(value, index) for index, (value, expected) in enumerate(zip(diff.kl, diff.expected))
              if expected is not None and math.isfinite(value)]
    rows = []
    for value, index in sorted(places, reverse=True)[:_LISTED]:
        expected = diff.expected[index]
        if expected is not None:
            rows.append((quoted("".join(diff.tokens[max(0, index - 6):index])[-40:]),
                         quoted(diff.tokens[index]),
                         quoted(expected[0]), quoted(expected[1]), number(value)))
    if not rows:
        return None
    return TextGrid("Where they differ most", ("after", "token", "reference expects", "variant expects",
                    "KL\nnats"),
                    tuple(rows))


def visible(token: str) -> str:
    """Line breaks and tabs with a sign before them; other control characters as their pictures."""
    return "".join(_picture(char) for char in token).replace("\n", "⏎\n").replace("\t", "⇥\t")


def quoted(token: str) -> str:
    """In quotation marks, on one line."""
    text = token.replace("\n", "⏎").replace("\t", "⇥")
    return f"“{''.join(map(_picture, text))}”"


def _picture(char: str) -> str:
    if ord(char) < 32:
        return char if char in "\n\t" else chr(0x2400 + ord(char))
    return char if char.isprintable() or char == " " else "\ufffd"
