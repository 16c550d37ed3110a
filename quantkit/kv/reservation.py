"""A cache whose memory is fixed: its pages exist from the beginning, and sequences are promised theirs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from quantkit.errors import UsageError
from quantkit.kv.base import PAGE
from quantkit.kv.cache import KVCache
from quantkit.kv.footprint import Footprint, LayerGroup, PeakUsage, footprint
from quantkit.kv.reread import LEAD
from quantkit.units import human_bytes

AHEAD = 128
"""Tokens that a decoding sequence may be given pages for at a time."""


class PageReservation:
    """Takes all of a cache's memory at once, and says which sequences it is enough for.

    Args:
        cache: with no sequence yet.
        size: bytes for all pages and what the policy watches, at most.
        sequences: that are to be there side by side, at most.
        context: tokens of the longest one.
        chunk: prompt tokens that go through the model at once.

    Attributes:
        tokens: of one sequence that is alone there, at most.

    Raises:
        UsageError: the memory isn't enough for a page of each head.
    """

    def __init__(self, cache: KVCache, size: int, sequences: int, context: int, chunk: int) -> None:
        self._cache = cache
        whole = functools.reduce(_either, (
            footprint(cache.config, cache.spec, cache.dtype, context, prompt, chunk)
            for prompt in {context - 1, max(1, context - (cache.policy.every or 1)), context // 2, 1}))
        whole = dataclasses.replace(whole, kinds=tuple(
            _ahead(kind, -(-context // PAGE)) for kind in whole.kinds))
        self._whole = [(kind.most.codes, kind.decoding.codes) for kind in whole.kinds]
        self._kinds = [self._kind_of(whole, layer) for layer in range(len(cache.stores))]
        self._room = _pages(whole, size, sequences)
        for store, kind in zip(cache.stores, self._kinds):
            store.pages.keep(self._room[kind] * cache.heads)
            if store.residual is not None:
                store.residual.keep(whole.kinds[kind].pages(sequences)[1] * cache.heads)
        self._promised: dict[int, Sequence[int]] = {}
        self._tokens: dict[int, int] = {}
        self.tokens = self._most(context)

    def fits(self, tokens: int) -> bool:
        """Whether there is room for a sequence of so many tokens, its prompt's included."""
        return all(sum(one[kind] for one in self._promised.values()) + need <= room
                   for kind, (need, room) in enumerate(zip(self._needs(tokens)[0], self._room)))

    def promise(self, number: int, tokens: int) -> None:
        """Its pages are for no other sequence from now on, until :meth:`release`."""
        self._promised[number], self._tokens[number] = self._needs(tokens)[0], tokens

    def settle(self, number: int) -> None:
        """Its prompt has ended: it needs no more than what is left of that and its answer take."""
        held, tokens = self._cache.sequence(number), self._tokens[number]
        ends = -(-(held.lengths + (tokens - int(held.seen[-1]))) // PAGE)  # [layers, heads]
        left = [0] * len(self._whole)
        for kind, pages in zip(self._kinds, ends.sum(1).tolist()):
            left[kind] = max(left[kind], -(-pages // self._cache.heads))
        self._promised[number] = [min(most, now) for most, now in zip(self._needs(tokens)[1], left)]

    def release(self, number: int) -> None:
        """A sequence has ended."""
        del self._promised[number], self._tokens[number]

    def check(self, tokens: int) -> None:
        """Raises UsageError: even alone such a sequence doesn't fit."""
        if tokens > self.tokens:
            held = human_bytes(self._cache.allocated_bytes)
            raise UsageError(f"{tokens:,} tokens don't fit into the KV cache",
                             why=f"its {held} hold a sequence of {self.tokens:,} tokens",
                             next="ask for fewer tokens, or give --kv int4")

    def _needs(self, tokens: int) -> tuple[Sequence[int], Sequence[int]]:
        """Pages of codes in a head, by kind of layer: at any time, and while it decodes.

        No policy holds more slots than there were tokens, nor more than it does of the longest text. One that
        has the prompt come again holds a piece of that twice meanwhile, on pages of its own.
        """
        piece = self._cache.policy.reread_prompt
        pages = -(-tokens // PAGE)
        filling = pages if piece is None else -(-(tokens + min(tokens, piece + LEAD)) // PAGE) + 1
        return ([min(most, filling) for most, _ in self._whole],
                [min(decoding, pages) for _, decoding in self._whole])

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
            if all(need <= room for need, room in zip(self._needs(middle)[0], self._room)):
                low = middle
            else:
                high = middle - 1
        return low


def _ahead(kind: LayerGroup, pages: int) -> LayerGroup:
    """With pages for :data:`AHEAD` tokens more, which it may be given before it needs them; all ``pages`` of
    the longest text are enough."""
    def more(one: PeakUsage) -> PeakUsage:
        return dataclasses.replace(one, codes=max(one.codes, min(one.codes + AHEAD // PAGE, pages)),
                                   residual=one.residual + (AHEAD // PAGE if one.residual else 0))

    return dataclasses.replace(kind, filling=more(kind.filling), decoding=more(kind.decoding))


def _either(one: Footprint, other: Footprint) -> Footprint:
    """Enough for both."""
    kinds = (dataclasses.replace(a, filling=a.filling | b.filling, decoding=a.decoding | b.decoding)
             for a, b in zip(one.kinds, other.kinds, strict=True))
    return dataclasses.replace(one, kinds=tuple(kinds))


def _pages(whole: Footprint, size: int, sequences: int) -> list[int]:
    """Pages of codes for a head, by kind of layer: all that so many sequences ever take, or as many as the
    memory has for those layers that grow with the text. What a policy watches comes first."""
    def bytes_of(kind: LayerGroup, pages: tuple[int, int]) -> int:
        return whole.heads * kind.layers * sum(n * each for n, each in zip(pages, kind.page_bytes))

    wanted = [kind.pages(sequences) for kind in whole.kinds]
    fixed = whole.acting_bytes + whole.watched_bytes(sequences)
    fixed += sum(bytes_of(kind, (codes if kind.own else 0, waits))
                 for kind, (codes, waits) in zip(whole.kinds, wanted))
    growing = sum(bytes_of(kind, (codes, 0)) for kind, (codes, _) in zip(whole.kinds, wanted) if not kind.own)
    share = min(1.0, (size - fixed) / growing) if growing else 1.0
    found = [codes if kind.own else int(codes * share) for kind, (codes, _) in zip(whole.kinds, wanted)]
    if size < fixed or min(found) < 1:
        raise UsageError(f"{human_bytes(max(0, size))} are too few for the KV cache of {sequences} sequences",
                         why=f"{human_bytes(fixed)} are needed before the first long text",
                         next="decode fewer sequences side by side, or give --kv int4")
    return found
