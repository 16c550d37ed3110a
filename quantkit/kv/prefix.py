"""Beginnings of texts whose keys and values stay in the cache, for other texts that begin in the same way.

A text's beginning is named by a chain of hashes, one for each block of 64 tokens, so that a block's name says
all tokens before it too. In a cache that drops nothing and encodes every token alone each block can be taken
up (:class:`BlockPrefixes`), in others only what a fork was kept of (:class:`StatePrefixes`).
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import threading
import weakref
from abc import ABC, abstractmethod
from array import array
from collections import Counter
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


@dataclass
class _Segment:
    """Neighboring blocks whose pages one sequence of the cache holds, and nothing else.

    Attributes:
        begin: blocks before its first.
    """

    number: int
    begin: int


@dataclass(eq=False)
class _Block:
    """A block of the tree.

    Attributes:
        name, depth: of it, and how many blocks end with it.
        parent: the one before; ``None`` at a text's beginning.
        segment: holds its pages.
        children: number of blocks right behind it.
        readers: number of running sequences that begin with it.
        used: the time of its last use.
    """

    name: bytes
    depth: int
    parent: _Block | None
    segment: _Segment
    children: int = 0
    readers: int = 0
    used: int = 0


class BlockPrefixes(PrefixCache):
    """The radix tree over the blocks of a divisible KV cache.

    A block's pages are shared by the sequences that read them, and nobody writes to a shared page. Blocks
    that a running sequence reads are never evicted: that would free nothing.

    Args:
        cache, budget: see :class:`~quantkit.kv.prefix.PrefixCache`.
    """

    def __init__(self, cache: KVCache, budget: PrefixBudget) -> None:
        super().__init__(cache, budget)
        self._blocks: dict[bytes, _Block] = {}
        self._readers: dict[int, _Block] = {}  # the last block that a running sequence begins with
        self._idle = 0  # blocks without readers
        self._leaves: list[tuple[int, int, _Block]] = []  # a heap by last use; stale entries are skipped
        self._ticks, self._entries = itertools.count(1), itertools.count()

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def held_bytes(self) -> int:
        return self._idle * PAGE * self._cache.bytes_per_token

    def match(self, names: Sequence[bytes], tokens: int, step: int = PAGE) -> PrefixMatch | None:
        end = last = None
        for name in names[:tokens // PAGE]:
            if (block := self._blocks.get(name)) is None:
                break
            last = block
            if block.depth * PAGE % step == 0:
                end = block
        if last is not None:
            self._touch(last)
        return None if end is None else PrefixMatch(end.depth * PAGE, end.name)

    def take(self, match: PrefixMatch, max_length: int) -> int:
        block = self._blocks[match.name]
        parts: list[tuple[int, int, int]] = []
        at: _Block | None = block
        while at is not None:
            depth, segment = at.depth, at.segment
            parts.append((segment.number, 0, depth - segment.begin))
            while at is not None and at.segment is segment:
                at = at.parent
        number = self._cache.fork_pages(parts[::-1], max_length)
        self._read(number, block)
        return number

    def insert(self, names: Sequence[bytes], number: int) -> None:
        """Keeps all whole blocks; of those that are there already, the tree's pages. A sequence that computed
        such a block itself, at the same time as another, counts as its reader."""
        cache = self._cache
        depth = min(cache.seen(number) // PAGE, len(names))
        known = next((at for at in range(depth) if names[at] not in self._blocks), depth)
        block = self._blocks[names[known - 1]] if known else None
        if known < depth:
            segment = _Segment(cache.fork_pages([(number, known, depth)]), known)
            for at, name in enumerate(names[known:depth], known + 1):
                if block is not None:
                    block.children += 1
                block = self._blocks[name] = _Block(name, at, block, segment)
            self._idle += depth - known
        if block is not None:
            self._read(number, block)
            self._touch(block)

    def release(self, number: int) -> None:
        at = self._readers.pop(number, None)
        while at is not None:
            at.readers -= 1
            if not at.readers:
                self._idle += 1
                self._push(at)
            at = at.parent
        self._budget.keep()

    def evict(self, pages: int = 1) -> bool:
        """Leaves go first, so that a block never stays without those before it."""
        evicted = 0
        while self._leaves and evicted < pages:
            entry = heapq.heappop(self._leaves)
            if self._is_current(*entry):
                self._remove(entry[2])
                evicted += 1
        return evicted > 0

    def spare_pages(self) -> Sequence[int]:
        return [self._idle * self._cache.heads] * len(self._cache.layers)

    def _read(self, number: int, block: _Block) -> None:
        """A running sequence begins with this block and all before it."""
        before = self._readers.get(number)
        if before is not None and before.depth >= block.depth:
            return
        self._readers[number] = block
        at: _Block | None = block
        while at is not None and at is not before:
            self._idle -= not at.readers
            at.readers += 1
            at = at.parent

    def _touch(self, block: _Block) -> None:
        """A text that ends with this block was used now."""
        now = next(self._ticks)
        at: _Block | None = block
        while at is not None:
            at.used = now
            at = at.parent
        self._push(block)

    def _push(self, block: _Block) -> None:
        """If a block may be evicted, note when it was used."""
        if block.children or block.readers:
            return
        if len(self._leaves) > 2 * len(self._blocks) + PAGE:  # most entries are stale
            self._leaves = [entry for entry in self._leaves if self._is_current(*entry)]
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (block.used, next(self._entries), block))

    def _is_current(self, used: int, entry: int, block: _Block) -> bool:
        """Whether an entry of the heap is the last use of a block that may be evicted."""
        return (not block.children and not block.readers and block.used == used
                and self._blocks.get(block.name) is block)

    def _remove(self, block: _Block) -> None:
        """Forget a leaf that nobody reads, and give back its pages, which are its segment's last."""
        del self._blocks[block.name]
        self._idle -= 1
        if (parent := block.parent) is not None:
            parent.children -= 1
            self._push(parent)
        segment = block.segment
        if left := block.depth - 1 - segment.begin:
            self._cache.truncate(segment.number, left)
        else:
            self._cache.free([segment.number])


@dataclass(frozen=True)
class _State:
    """A fork of a sequence at the end of a block.

    Attributes:
        number: the fork's number in the cache.
        tokens: the number of tokens that it has had.
        bytes: the size of its pages and of what is tracked.
    """

    number: int
    tokens: int
    bytes: int


class StatePrefixes(PrefixCache):
    """States by the name of their last block, which says all tokens before it.

    Args:
        cache, budget: see :class:`~quantkit.kv.prefix.PrefixCache`.
        max_states: the largest number of states that it holds; ``None``: as many as the budget allows.
    """

    def __init__(self, cache: KVCache, budget: PrefixBudget, max_states: int | None = None) -> None:
        super().__init__(cache, budget)
        self._max_states = max_states
        self._states: dict[bytes, _State] = {}  # in the order of their last use
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._states)

    @property
    def held_bytes(self) -> int:
        """A bound: running sequences and other states may hold some of it too."""
        return self._bytes

    def match(self, names: Sequence[bytes], tokens: int, step: int = PAGE) -> PrefixMatch | None:
        for name in reversed(names[:tokens // PAGE]):
            state = self._states.get(name)
            if state is not None and state.tokens % step == 0:
                self._states[name] = self._states.pop(name)
                return PrefixMatch(state.tokens, name)
        return None

    def take(self, match: PrefixMatch, max_length: int) -> int:
        number = self._cache.fork(self._states[match.name].number)
        self._cache.sequence(number).max_length = max_length
        return number

    def insert(self, names: Sequence[bytes], number: int) -> None:
        """Keeps the state after the last token if that is the last of a block."""
        seen = self._cache.seen(number)
        depth, odd = divmod(seen, PAGE)
        if odd or not 0 < depth <= len(names):
            return
        name = names[depth - 1]
        if name in self._states:
            self._states[name] = self._states.pop(name)
            return
        fork = self._cache.fork(number)
        self._states[name] = _State(fork, seen, self._cache.bytes_of(fork))
        self._count()
        while self._max_states is not None and len(self._states) > self._max_states:
            self.evict()
        self._budget.keep()

    def release(self, number: int) -> None:
        """States are independent of running sequences."""

    def evict(self, pages: int = 1) -> bool:
        """One state goes, however many pages it has by itself."""
        if not self._states:
            return False
        self._cache.free([self._states.pop(next(iter(self._states))).number])
        self._count()
        return True

    def clear(self) -> None:
        self._cache.free([state.number for state in self._states.values()])
        self._states = {}
        self._bytes = 0

    def spare_pages(self) -> Sequence[int]:
        spare = []
        for index, layer in enumerate(self._cache.layers):
            states_with = Counter(page for state in self._states.values()
                                  for head in self._cache.sequence(state.number).layers[index].pages
                                  for page in head)
            pool = layer.store.pages
            spare.append(sum(pool.holders(page) == count for page, count in states_with.items()))
        return spare

    def _count(self) -> None:
        """Count the bytes again. Where all is kept, states of one text share pages, in each head as in the
        first. What windows keep moves, so that states of those share next to nothing."""
        cache, states = self._cache, self._states.values()
        self._bytes = sum(state.bytes for state in states)
        if not cache.keeps_all:
            return
        firsts = [cache.sequence(state.number).layers[0] for state in states]
        for heads, token_bytes in (([state.pages[0] for state in firsts], cache.bytes_per_token),
                                   ([state.residual[0] for state in firsts], cache.residual_bytes_per_token)):
            repeated = sum(map(len, heads)) - len(set().union(*heads))
            self._bytes -= repeated * PAGE * token_bytes


def build_prefix_cache(cache: KVCache, budget: PrefixBudget, max_states: int | None = None) -> PrefixCache:
    """The kind of prefix cache that a KV cache can have.

    Args:
        cache: the cache whose pages it holds.
        budget: bytes that it may hold beside running sequences, shared with others.
        max_states: the largest number of states that it holds where texts can't be taken up at every block;
            ``None``: no limit.
    """
    return BlockPrefixes(cache, budget) if cache.divisible else StatePrefixes(cache, budget, max_states)
