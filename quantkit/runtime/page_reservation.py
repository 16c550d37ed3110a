"""A cache of a fixed size: which sequences there are pages for, before any is taken."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.kv.base import PAGE
from quantkit.kv.cache import KVCache
from quantkit.kv.prefix import PrefixCache
from quantkit.kv.reread import OVERLAP
from quantkit.runtime.memory.kv import Footprint, available_pages, reserved_footprint
from quantkit.runtime.memory.serving import most_that_fit
from quantkit.support.errors import UsageError
from quantkit.support.units import human_bytes


class PageReservation:
    """Takes all of a cache's memory at once, and says which sequences it is enough for.

    A sequence reserves the pages for a number of tokens. Pages that it holds are counted as they are, shared
    ones once; what it may still take up to its reservation comes on top.

    Args:
        cache: a cache without sequences.
        size: bytes for all pages and for what the policy tracks, at most.
        sequences: the largest number of sequences side by side.
        context: tokens of the longest one.
        chunk: prompt tokens that go through the model at once.
        prompts: those that are read side by side.
        forks: sequences beside those that are kept for others to begin with.

    Attributes:
        tokens: the longest sequence that fits alone.

    Raises:
        UsageError: the memory isn't enough for a page of each head.
    """

    def __init__(self, cache: KVCache, size: int, sequences: int, context: int, chunk: int,
                 prompts: int = 1, forks: int = 0) -> None:
        self._cache = cache
        longest = reserved_footprint(cache, context, chunk)
        self._limits = [(group.peak.codes, group.decoding.codes) for group in longest.groups]
        self._groups = [self._group_of(longest, layer) for layer in range(len(cache.layers))]
        self._available = available_pages(longest, size, sequences, forks, prompts)
        for layer, group in zip(cache.layers, self._groups):
            store = layer.store
            store.pages.preallocate(self._available[group] * cache.heads)
            if store.residual is not None:
                pages = longest.groups[group].pages(sequences + forks, prompts)[1]
                store.residual.preallocate(pages * cache.heads)
        shared = longest.decoded_page_bytes * cache.heads * max(self._available)
        cache.decoded.bound(size - shared - sum(pool.allocated_bytes for pool in cache.pools))
        self._reserved: dict[int, tuple[int, Sequence[int]]] = {}  # tokens, and pages by layer
        self.tokens = most_that_fit(self._fits, context)

    def check(self, tokens: int) -> None:
        """Raises UsageError: even alone such a sequence doesn't fit."""
        if tokens > self.tokens:
            size = human_bytes(self._cache.allocated_bytes)
            raise UsageError(f"{tokens:,} tokens don't fit into the KV cache",
                             why=f"its {size} hold a sequence of {self.tokens:,} tokens",
                             next="ask for fewer tokens, or give --kv int4")

    def reserve(self, number: int, tokens: int) -> None:
        """Reserve a sequence's pages for its prompt and answer, until :meth:`release`."""
        heads = self._cache.heads
        self._reserved[number] = tokens, [
            pages * heads for pages in self._by_layer(self._needed(tokens)[0])]

    def reserved(self, number: int) -> int:
        """Tokens for which a sequence has its pages."""
        return self._reserved[number][0]

    def extend(self, number: int, tokens: int, prefixes: PrefixCache | None = None) -> bool:
        """Reserve pages for a sequence behind its prompt: for what it holds and the tokens that are missing
        to ``tokens``.

        Args:
            prefixes: the prefixes that may be given up for it.

        Returns:
            Whether there are enough; if not, its reservation stays as it was.
        """
        before = self._reserved[number]
        self._reserved[number] = tokens, self._to_answer(number, tokens)
        if self.make_room(prefixes):
            return True
        self._reserved[number] = before
        return False

    def shrink_to_answer(self, number: int) -> None:
        """A sequence's prompt has ended: reserve no more than what it kept and its answer take."""
        tokens = self._reserved[number][0]
        self._reserved[number] = tokens, self._to_answer(number, tokens)

    def make_room(self, prefixes: PrefixCache | None) -> bool:
        """Whether there are pages for all that is reserved, once prefixes are given up for it. None are if
        even all of them wouldn't be enough."""
        missing = self._missing()
        if missing and (prefixes is None or self._missing(prefixes.spare_pages())):
            return False
        while missing and prefixes is not None and prefixes.evict(missing):
            missing = self._missing()
        return not missing

    def release(self, number: int) -> None:
        """A sequence has ended. One that has reserved nothing is ignored."""
        self._reserved.pop(number, None)

    def _to_answer(self, number: int, tokens: int) -> list[int]:
        """Pages by layer of a sequence behind its prompt that is to have ``tokens`` tokens."""
        sequence, heads = self._cache.sequence(number), self._cache.heads
        ends = -(-(sequence.lengths + max(0, tokens - int(sequence.seen[-1]))) // PAGE)  # [layers, heads]
        limits = self._by_layer(self._needed(tokens)[1])
        return [min(limit * heads, pages) for limit, pages in zip(limits, ends.sum(1).tolist())]

    def _missing(self, spare: Sequence[int] | None = None) -> int:
        """Pages of a head that are missing for all that is held and reserved, in the layer where most are.

        Args:
            spare: pages of each layer that only prefixes hold, if those don't count.
        """
        future = [0] * len(self._groups)
        for number, (_, needed) in self._reserved.items():
            for layer, (pages, has) in enumerate(zip(needed, self._holds(number, spare is not None))):
                future[layer] += max(0, pages - has)
        heads, missing = self._cache.heads, 0
        for layer, group in enumerate(self._groups):
            used = self._cache.layers[layer].store.pages.used - (0 if spare is None else spare[layer])
            missing = max(missing, used + future[layer] - self._available[group] * heads)
        return -(-missing // heads)

    def _holds(self, number: int, alone: bool) -> list[int]:
        """Pages of a sequence by layer that it needn't take again. A page that it shares and may still write
        to must be copied then, unless there are no prefixes to share it with: it is ``alone``."""
        cache = self._cache
        layers = zip(cache.layers, cache.sequence(number).layers)
        if cache.divisible or alone:
            return [sum(map(len, state.pages)) for _, state in layers]
        first, holds = cache.codecs.first, []
        for layer, state in layers:
            # where all is kept, nobody writes to a page whose tokens are encoded
            starts = state.starts.tolist()
            full_pages = [(start - first) // PAGE if cache.keeps_all else 0 for start in starts]
            holds.append(sum(full + layer.store.pages.count_unshared(pages[full:])
                             for full, pages in zip(full_pages, state.pages)))
        return holds

    def _by_layer(self, by_group: Sequence[int]) -> list[int]:
        return [by_group[group] for group in self._groups]

    def _needed(self, tokens: int) -> tuple[Sequence[int], Sequence[int]]:
        """Pages of codes in a head, by group of layers: at any time, and while the sequence decodes.

        No policy holds more slots than there were tokens, nor more than it holds of the longest text. One
        that rereads the prompt holds a chunk of it twice meanwhile, on pages of its own.
        """
        chunk = self._cache.policy.reread_prompt
        pages = -(-tokens // PAGE)
        filling = pages if chunk is None else -(-(tokens + min(tokens, chunk + OVERLAP)) // PAGE) + 1
        return ([min(peak, filling) for peak, _ in self._limits],
                [min(decoding, pages) for _, decoding in self._limits])

    def _fits(self, tokens: int) -> bool:
        return all(needed <= available
                   for needed, available in zip(self._needed(tokens)[0], self._available))

    def _group_of(self, longest: Footprint, layer: int) -> int:
        cache = self._cache
        model_window = cache.layers[layer].policy is not cache.policy
        window = cache.config.sliding_windows[layer]
        return next(index for index, group in enumerate(longest.groups)
                    if (group.model_window, group.window) == (model_window, window))
