r"""Regular expressions on layers' names. Patterns that could backtrack exponentially are rejected.

Python's matcher tries one way through a pattern after another. A way is a choice at each place that leaves
one: which of the alternatives, ``?`` taken or not, how many characters a repetition takes. At most, it tries

- the product of what stands one behind the other, the sum of alternatives, one more for a group with ``?``;
- ``n - m + 1`` for ``{m,n}``, and :data:`DIGITS` + 1 for ``\d+``: a name's numbers have no more;
- ``C(L + k, k)`` for ``k`` other repetitions one behind the other, as all of them share a name's ``L`` =
  :data:`NAME` characters; none for ``.*`` at the very end, which succeeds at once.

A way takes at most as many steps as pattern and name have characters. So no match takes more steps than
:data:`WAYS` times that.
"""

from __future__ import annotations

import re
from math import comb

LONGEST = 1000
NAME = 64
DIGITS = 10
"""Characters of a pattern, of a layer's name, of a number in it."""
WAYS = 1 << 20
_TOKEN = re.compile(r"""
    (?P<open>\((?!\?)|\(\?(?::|P<\w+>)) | (?P<look>\(\?<?[=!]) | (?P<odd>\(\?(?!i\))|\\[1-9])
    | (?P<close>\)) | (?P<bar>\|) | (?P<repeat>(?:[*+?]|\{\d*,\d*\}|\{\d+\})[?+]?)
    | (?P<number>\\d|\[0-9\]) | (?:\(\?i\)|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.)""", re.VERBOSE | re.DOTALL)
_TAIL = re.compile(r"(?<!\\)\.[*+]\$?\Z")

Ways = list[int]
"""How many, as the coefficients of ``C(L + k, k)``."""


def compiled(text: str) -> re.Pattern[str]:
    """``text`` as a pattern for the names of layers.

    Raises:
        ValueError: it is none, or a match may take long; the message goes on after "it".
    """
    if len(text) > LONGEST:
        raise ValueError(f"isn't read: it is longer than {LONGEST} characters")
    try:
        pattern = re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"is no regular expression: {error}") from None
    if sum(count * comb(NAME + k, k) for k, count in enumerate(_ways(_TAIL.sub("", text)))) > WAYS:
        raise ValueError("repeats so much, or leaves so many choices, that matching a name might never end")
    return pattern


def _ways(text: str) -> Ways:
    total: Ways = [0]  # of the alternatives before this one
    last, line = [1], [1]  # of what a repetition would repeat; of what stands before it
    outer: list[tuple[Ways, Ways, bool]] = []
    single, number = False, False
    for token in _TOKEN.finditer(text):
        kind = token.lastgroup
        if kind == "odd":
            raise ValueError(f"isn't read: it has {token[0]}")
        if kind == "repeat":
            last = _repeated(last, token[0], single, number)
            continue
        line, last = _times(line, last), [1]
        single, number = kind in (None, "number"), kind == "number"
        if kind in ("open", "look"):
            outer.append((total, line, kind == "look"))
            total, line = [0], [1]
        elif kind == "bar":
            total, line = _plus(total, line), [1]
        elif kind == "close":
            last = _plus(total, line)
            total, line, look = outer.pop()
            if look:  # its characters are read again behind it
                last = [sum(count * comb(NAME + k, k) for k, count in enumerate(last))]
    return _plus(total, _times(line, last))


def _repeated(ways: Ways, quantifier: str, single: bool, number: bool) -> Ways:
    """``single``: what is repeated is one character; ``number``: a digit."""
    if quantifier[0] == "?":
        return _plus(ways, [1])
    if not single:
        raise ValueError("repeats so much that it may never be done with a name: a group is repeated")
    least = ""
    comma = ","
    highest = ""
    if quantifier[0] == "{":
        least, comma, highest = quantifier.rstrip("?+").strip("{}").partition(",")
    choices = int(highest or NAME + int(least or 0)) - int(least or 0) + 1 if comma else 1
    if number:
        choices = min(choices, DIGITS + 1)
    return [0, 1] if choices > NAME else [choices]


def _times(first: Ways, other: Ways) -> Ways:
    product = [0] * (len(first) + len(other) - 1)
    for i, a in enumerate(first):
        for j, b in enumerate(other):
            product[i + j] += a * b
    return product


def _plus(first: Ways, other: Ways) -> Ways:
    longer, shorter = sorted((first, other), key=len, reverse=True)
    return [a + b for a, b in zip(longer, [*shorter, *[0] * len(longer)], strict=False)]
