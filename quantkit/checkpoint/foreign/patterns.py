"""Regular expressions in strangers' files: only such as are soon done with any name."""

from __future__ import annotations

import re

from quantkit.models.reader import ConfigReader

LONGEST = 1000
MOST = 4
"""Repetitions; a match tries at most the length of a name to their power."""
_NEUTRAL = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]")
_REPEATS = re.compile(r"[*+]|\{\d*,?\d*\}")


def compiled(config: ConfigReader, key: str, text: str) -> re.Pattern[str]:
    """``text`` as a pattern.

    Raises:
        UnsupportedModelError: it is none, or it repeats so much that a match may take ages: repetitions
            inside of a repeated group, more than :data:`MOST` of them, or references to groups.
    """
    plain = _NEUTRAL.sub("x", text)
    if len(text) > LONGEST or re.search(r"\\[1-9]|\(\?P=", text):
        raise config.wrong(key, text[:80], "such a pattern isn't read")
    if len(_REPEATS.findall(plain)) > MOST or re.search(r"\)(?:[*+]|\{)", plain):
        raise config.wrong(key, text[:80], "it repeats so much that it may never be done with a name")
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise config.wrong(key, text[:80], f"it is no regular expression: {error}") from None
