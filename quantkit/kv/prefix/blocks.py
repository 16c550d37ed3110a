"""Prefixes of a cache that drops nothing and encodes every token alone: each block can be taken up.

The blocks form a radix tree. A block's pages are shared by the sequences that read them, and nobody writes to
a shared page. Blocks that a running sequence reads are never evicted: that would free nothing.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.kv.base import PAGE
from quantkit.kv.cache import KVCache
from quantkit.kv.prefix.base import PrefixBudget, PrefixCache, PrefixMatch


@dataclass
class _Segment:
    """Neighboring blocks whose pages one sequence of the cache holds, and nothing else.

    Attributes:
        number: the sequence's number.
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

    Args:
        cache, budget: see :class:`~quantkit.kv.prefix.base.PrefixCache`.
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
        """See the base class."""
        return self._idle * PAGE * self._cache.bytes_per_token

    def match(self, names: Sequence[bytes], tokens: int, step: int = PAGE) -> PrefixMatch | None:
        """See the base class."""
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
        """See the base class."""
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
        """See the base class. Keeps all whole blocks; of those that are there already, the tree's pages. A
        sequence that computed such a block itself, at the same time as another, counts as its reader."""
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
        """See the base class."""
        at = self._readers.pop(number, None)
        while at is not None:
            at.readers -= 1
            if not at.readers:
                self._idle += 1
                self._push(at)
            at = at.parent
        self._budget.keep()

    def evict(self, pages: int = 1) -> bool:
        """See the base class. Leaves go first, so that a block never stays without those before it."""
        evicted = 0
        while self._leaves and evicted < pages:
            entry = heapq.heappop(self._leaves)
            if self._is_current(*entry):
                self._remove(entry[2])
                evicted += 1
        return evicted > 0

    def spare_pages(self) -> Sequence[int]:
        """See the base class."""
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
