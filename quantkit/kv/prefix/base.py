"""What both kinds of prefix cache have in common: names of texts' beginnings, a match, a budget."""

from __future__ import annotations

import hashlib
import threading
import weakref
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.kv.base import PAGE
from quantkit.kv.cache import KVCache


def block_names(tokens: Sequence[int], names: Sequence[bytes] = (), salt: bytes = b"") -> list[bytes]:
    """The names of a text's whole blocks.

    Args:
        tokens: ids of the whole text.
        names: those of its first blocks, if they are known.
        salt: texts with different salts have no names in common. What a client chose comes as a digest.

    Returns:
        A digest for each whole block of 64 tokens: of the block and all before it.
    """
    out = list(names)
    for start in range(PAGE * len(out), len(tokens) - PAGE + 1, PAGE):
        before = out[-1] if out else salt
        out.append(hashlib.sha256(before + array("q", tokens[start:start + PAGE]).tobytes()).digest())
    return out


@dataclass(frozen=True)
class PrefixMatch:
    """The longest beginning of a text that is there.

    Attributes:
        tokens: the number of its tokens.
        name: the name of its last block.
    """

    tokens: int
    name: bytes


class PrefixBudget:
    """Memory that the prefix caches of several KV caches share.

    Args:
        limit: bytes that they may hold together beside running sequences; ``None``: no limit, whoever needs
            pages calls :meth:`PrefixCache.evict`.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit, self._lock = limit, threading.Lock()
        self._caches: weakref.WeakSet[PrefixCache] = weakref.WeakSet()

    def join(self, cache: PrefixCache) -> None:
        """Count what this one holds from now on. May be called from any thread."""
        with self._lock:
            self._caches.add(cache)

    def keep(self) -> None:
        """Give back what is beyond the limit, from whichever holds most."""
        if self._limit is None:
            return
        with self._lock:
            caches = list(self._caches)
        while sum(cache.held_bytes for cache in caches) > self._limit:
            if not max(caches, key=lambda cache: cache.held_bytes).evict():
                return


class PrefixCache(ABC):
    """Beginnings of texts, kept in a KV cache for other texts that begin in the same way.

    Args:
        cache: the cache whose pages it holds.
        budget: the memory that it shares with others.
    """

    def __init__(self, cache: KVCache, budget: PrefixBudget) -> None:
        self._cache, self._budget = cache, budget
        budget.join(self)

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Bytes that it holds, without what running sequences hold too."""

    @abstractmethod
    def match(self, names: Sequence[bytes], tokens: int, step: int = PAGE) -> PrefixMatch | None:
        """The longest beginning that can be taken up; it counts as used now.

        Args:
            names: the names of the text's blocks.
            tokens: the largest number of tokens of the beginning.
            step: its number of tokens is a multiple of this one.
        """

    @abstractmethod
    def take(self, match: PrefixMatch, max_length: int) -> int:
        """Begin a sequence with a beginning that is there. Returns its number; :meth:`release` it.

        Args:
            match: from :meth:`match`; nothing was evicted since.
            max_length: tokens that the sequence will have at most.
        """

    @abstractmethod
    def insert(self, names: Sequence[bytes], number: int) -> None:
        """Keep what a running sequence holds, as far as other texts can take it up. It stays the caller's;
        :meth:`release` it.

        Args:
            names: the names of the blocks that its tokens fill.
            number: the sequence's number.
        """

    @abstractmethod
    def release(self, number: int) -> None:
        """A sequence that was taken or inserted is about to end, or hadn't been; keeps the budget."""

    @abstractmethod
    def evict(self, pages: int = 1) -> bool:
        """Give back what wasn't used for the longest time: this number of pages of each head, or all that no
        running sequence holds. Returns whether anything was given back."""

    @abstractmethod
    def spare_pages(self) -> Sequence[int]:
        """Pages of each layer that would be free if everything was evicted."""

    def clear(self) -> None:
        """Give back everything that no running sequence holds."""
        while self.evict():
            pass
