"""Finds passages that two texts share, by hashed n-grams.

Of words, 13 at a time, as GPT-3's authors looked for test sets in their training text
(https://arxiv.org/abs/2005.14165, appendix C); of tokens, 32 at a time, where a text repeats itself.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

WORDS = 13
SHINGLE = 32
_SPACELESS = "぀-ヿ㐀-鿿豈-﫿가-힯"  # scripts in which a letter counts as a word
_WORD = re.compile(rf"[{_SPACELESS}]|[^\W{_SPACELESS}]+")
_BASE = np.uint64(0x9E3779B97F4A7C15)

Hashes = NDArray[np.uint64]


def word_hashes(text: str) -> Hashes:
    """Hashes ``[n]`` of every 13 consecutive words, without case and punctuation."""
    return ngrams([zlib.crc32(word.encode()) for word in _WORD.findall(text.lower())], WORDS)


def ngrams(items: Sequence[int] | NDArray[np.int64], n: int) -> Hashes:
    """A hash of every ``n`` items in a row, ``[len - n + 1]``, empty if there are fewer.

    ``items`` may be ``[rows, len]``; then each row gets its own, ``[rows, len - n + 1]``.
    """
    mixed = np.asarray(items, np.uint64)
    count = mixed.shape[-1] - n + 1 if mixed.size else 0
    if count <= 0:
        return np.zeros((*mixed.shape[:-1], 0), np.uint64)
    mixed = (mixed + np.uint64(1)) * _BASE
    mixed = (mixed ^ (mixed >> np.uint64(29))) * _BASE  # so that no small pattern in the ids cancels out
    total = np.zeros((*mixed.shape[:-1], count), np.uint64)
    for start in range(n):  # a polynomial modulo 2⁶⁴
        total = total * _BASE + mixed[..., start:start + count]
    return total


class Passages:
    """The 13-grams of a text that others are compared with.

    Args:
        text: the whole of it.
    """

    def __init__(self, text: str) -> None:
        self._known = np.unique(word_hashes(text))

    def share(self, text: str) -> float:
        """The share of a text's 13-grams that are here too; 0 if the text has fewer words."""
        hashes = word_hashes(text)
        if not hashes.size or not self._known.size:
            return 0.0
        places = np.searchsorted(self._known, hashes).clip(max=self._known.size - 1)
        return float((self._known[places] == hashes).mean())


def repeated(windows: NDArray[np.int64]) -> tuple[int, int]:
    """How many windows (``[windows, tokens]``) an earlier one is equal to, and how many others share half
    of their 32-token shingles with earlier ones."""
    first = np.unique(windows, axis=0, return_index=True)[1]
    hashes = ngrams(windows, min(SHINGLE, windows.shape[1]))
    _, first_places, inverse = np.unique(hashes.ravel(), return_index=True, return_inverse=True)
    numbers = np.arange(len(windows))[:, None]
    earlier = (first_places // hashes.shape[1])[inverse.reshape(hashes.shape)] < numbers
    near = set(np.flatnonzero(earlier.mean(axis=1) >= 0.5).tolist())
    same = set(range(len(windows))) - set(first.tolist())
    return len(same), len(near - same)
