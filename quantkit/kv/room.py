"""A cache whose memory is fixed: its pages exist from the beginning, and sequences are promised theirs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from quantkit.errors import UsageError
from quantkit.kv.base import PAGE
from quantkit.kv.cache import KVCache
from quantkit.kv.predict import Footprint, Kind, footprint
from quantkit.units import human_bytes


class Room:
    """Takes all of a cache's memory at once, and says which sequences it is enough for.

    Args:
        cache: with no sequence yet.
        size: bytes for all pages, at most.
        sequences: that are to be there side by side, at most.
        context: tokens of the longest one.
        chunk: prompt tokens that go through the model at once.

    Attributes:
        tokens: of one sequence that is alone there, at most.

    Raises:
        UsageError: the memory isn't enough for a page of each head.
    """

    def __init__(self, cache: KVCache, size: int, sequences: int, context: int, chunk: int) -> None:
        self._cache, self._chunk = cache, chunk
        self._needs = functools.lru_cache(maxsize=1024)(self._footprint)
        whole = functools.reduce(_either, (self._needs(prompt, context)
                                           for prompt in (context - 1, context // 2, 1)))
        self._kinds = [self._kind_of(whole, layer) for layer in range(len(cache.stores))]
        self._room = _pages(whole, size, sequences)
        for store, kind in zip(cache.stores, self._kinds):
            store.pages.keep(self._room[kind] * cache.heads)
            if store.waiting is not None:
                store.waiting.keep(whole.kinds[kind].pages(sequences)[1] * cache.heads)
        self._promised: dict[int, Sequence[int]] = {}
        self.tokens = self._most(context)

    def fits(self, prompt: int, tokens: int) -> bool:
        """Whether there is room for a sequence of so many tokens, of which some are its prompt."""
        return all(sum(one[kind] for one in self._promised.values()) + need <= room
                   for kind, (need, room) in enumerate(zip(self._codes(prompt, tokens), self._room)))

    def promise(self, number: int, prompt: int, tokens: int) -> None:
        """Its pages are for no other sequence from now on, until :meth:`release`."""
        self._promised[number] = self._codes(prompt, tokens)

    def release(self, number: int) -> None:
        """A sequence has ended."""
        del self._promised[number]

    def check(self, prompt: int, tokens: int) -> None:
        """Raises UsageError: even alone such a sequence doesn't fit."""
        if any(need > room for need, room in zip(self._codes(prompt, tokens), self._room)):
            held = human_bytes(self._cache.allocated_bytes)
            raise UsageError(f"{tokens:,} tokens don't fit into the KV cache",
                             why=f"its {held} hold a sequence of {self.tokens:,} tokens",
                             next="ask for fewer tokens, or give --kv int4")

    def _codes(self, prompt: int, tokens: int) -> Sequence[int]:
        """Pages of codes in a head, by kind of layer; lengths are rounded up, so that few are worked out."""
        limit = self._cache.config.max_position_embeddings
        up = min(limit, -(-tokens // PAGE) * PAGE)
        found = self._needs(min(up - 1, -(-prompt // PAGE) * PAGE), up)
        return [kind.most.codes for kind in found.kinds]

    def _footprint(self, prompt: int, tokens: int) -> Footprint:
        cache = self._cache
        return footprint(cache.config, cache.spec, cache.dtype, tokens, prompt, self._chunk)

    def _kind_of(self, whole: Footprint, layer: int) -> int:
        cache = self._cache
        own = cache.policies[layer] is not cache.policy
        window = cache.config.sliding_windows[layer]
        return next(at for at, kind in enumerate(whole.kinds) if (kind.own, kind.window) == (own, window))

    def _most(self, context: int) -> int:
        """The longest sequence that fits alone."""
        low, high = 0, context
        while low < high:
            middle = (low + high + 1) // 2
            if all(need <= room for need, room in zip(self._codes(middle - 1, middle), self._room)):
                low = middle
            else:
                high = middle - 1
        return low


def _either(one: Footprint, other: Footprint) -> Footprint:
    """Enough for both."""
    kinds = (dataclasses.replace(a, filling=a.filling | b.filling, decoding=a.decoding | b.decoding)
             for a, b in zip(one.kinds, other.kinds, strict=True))
    return dataclasses.replace(one, kinds=tuple(kinds))


def _pages(whole: Footprint, size: int, sequences: int) -> list[int]:
    """Pages of codes for a head, by kind of layer: all that so many sequences ever take, or as many as the
    memory has for those layers that grow with the text."""
    def bytes_of(kind: Kind, pages: tuple[int, int]) -> int:
        return whole.heads * kind.layers * sum(n * each for n, each in zip(pages, kind.page_bytes))

    wanted = [kind.pages(sequences) for kind in whole.kinds]
    fixed = sum(bytes_of(kind, (codes if kind.own else 0, waits))
                for kind, (codes, waits) in zip(whole.kinds, wanted))
    growing = sum(bytes_of(kind, (codes, 0)) for kind, (codes, _) in zip(whole.kinds, wanted) if not kind.own)
    share = min(1.0, (size - fixed) / growing) if growing else 1.0
    found = [codes if kind.own else int(codes * share) for kind, (codes, _) in zip(whole.kinds, wanted)]
    if size < fixed or min(found) < 1:
        raise UsageError(f"{human_bytes(max(0, size))} are too few for the KV cache of {sequences} sequences",
                         why=f"{human_bytes(fixed)} are needed before the first long text",
                         next="decode fewer sequences side by side, or give --kv int4")
    return found
