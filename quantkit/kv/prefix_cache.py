"""Beginnings of texts whose keys and values stay in the cache, for other texts that begin in the same way.

A text's beginning is named by a chain of hashes, one for each block of 64 tokens, so that a block's name says
all tokens before it too. The names form a radix tree. A block holds pages of the cache: the tree keeps forks
of sequences, which share pages with whoever else reads them, and nobody writes to a shared page.

Where nothing is dropped and every token is encoded alone, each block can be taken up. Otherwise a sequence's
state differs from place to place, and it can be taken up only where a fork was kept.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import threading
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from quantkit.kv.base import PAGE
from quantkit.kv.cache import KVCache


def block_names(tokens: Sequence[int], names: Sequence[bytes] = (), salt: bytes = b"") -> list[bytes]:
    """The names of a text's whole blocks.

    Args:
        tokens: ids of the whole text.
        names: those of its first blocks, if they are known.
        salt: distinguishes texts whose keys differ though their tokens don't.

    Returns:
        A digest for each whole block of 64 tokens: of the block and all before it.
    """
    out = list(names)
    for start in range(PAGE * len(out), len(tokens) - PAGE + 1, PAGE):
        before = out[-1] if out else salt
        out.append(hashlib.sha256(before + array("q", tokens[start:start + PAGE]).tobytes()).digest())
    return out


@dataclass
class _Fork:
    """A sequence that the tree holds.

    Attributes:
        number: in the cache.
        blocks: blocks of the tree that it holds.
    """

    number: int
    blocks: int = 0


@dataclass(eq=False)
class _Block:
    """A block of the tree.

    Attributes:
        name, depth: of it, and how many blocks end with it.
        parent: the one before; ``None`` at a text's beginning.
        fork: what a sequence that goes on behind it reads; ``None``: none can.
        bytes: that go with it.
        children: blocks behind it.
        used: when it was last used.
    """

    name: bytes
    depth: int
    parent: _Block | None
    fork: _Fork | None = None
    bytes: int = 0
    children: int = 0
    used: int = 0


@dataclass(frozen=True)
class PrefixMatch:
    """The longest beginning of a text that is there.

    Attributes:
        tokens: of it.
        pages: pages in each head that a sequence needn't take; 0 where those may be copied later.
    """

    tokens: int
    pages: int
    _block: _Block = field(repr=False)


class PrefixBudget:
    """Memory that the prefix caches of several KV caches share.

    Args:
        limit: bytes that they may hold together; ``None``: no limit, whoever needs pages calls
            :meth:`PrefixCache.evict`.
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
        with self._lock:
            caches = list(self._caches)
        while self._limit is not None and sum(cache.bytes for cache in caches) > self._limit:
            max(caches, key=lambda cache: cache.bytes).evict()


class PrefixCache:
    """The radix tree over the blocks of one KV cache.

    Args:
        cache: whose pages it holds.
        budget: bytes of pages that it may hold, or what it shares with others; ``None``: no limit.
        max_forks: forks that it may hold where the cache isn't divisible; ``None``: no limit.

    Attributes:
        bytes: that it holds, those that running sequences share included.
    """

    def __init__(self, cache: KVCache, budget: PrefixBudget | int | None,
                 max_forks: int | None = None) -> None:
        self._cache, self._max_forks = cache, max_forks
        self._budget = budget if isinstance(budget, PrefixBudget) else PrefixBudget(budget)
        self._blocks: dict[bytes, _Block] = {}
        self._forks = 0
        self._leaves: list[tuple[int, int, _Block]] = []  # a heap by last use; stale entries are skipped
        self._ticks, self._entries = itertools.count(1), itertools.count()
        self.bytes = 0
        self._budget.join(self)

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, names: Sequence[bytes], tokens: int, step: int = PAGE) -> PrefixMatch | None:
        """The longest beginning that can be taken up, of at most ``tokens`` tokens; it counts as used now.

        Args:
            names: of the text's blocks.
            tokens: at most.
            step: its number of tokens is a multiple of this one.
        """
        end = last = None
        for name in names[:tokens // PAGE]:
            if (block := self._blocks.get(name)) is None:
                break
            last = block
            if block.fork is not None and block.depth * PAGE % step == 0:
                end = block
        if last is not None:
            self._touch(last)
        if end is None:
            return None
        return PrefixMatch(end.depth * PAGE, end.depth if self._cache.divisible else 0, end)

    def take(self, match: PrefixMatch, max_length: int) -> int:
        """Begin a sequence with a beginning that is there. Returns its number.

        Args:
            match: from :meth:`match`; nothing was evicted since.
            max_length: tokens that the sequence will have at most.
        """
        cache, fork = self._cache, match._block.fork
        assert fork is not None
        number = (cache.fork_beginning(fork.number, match._block.depth) if cache.divisible
                  else cache.fork(fork.number))
        cache.sequence(number).max_length = max_length
        return number

    def insert(self, names: Sequence[bytes], number: int) -> None:
        """Keep what a sequence holds: of a divisible cache all whole blocks, else the state after its last
        token, which must be a block's last.

        Args:
            names: of the blocks that its tokens fill.
            number: of the sequence. The tree forks it; it stays the caller's.
        """
        cache = self._cache
        depth = min(cache.seen(number) // PAGE, len(names))
        if not depth or (not cache.divisible and depth * PAGE != cache.seen(number)):
            return
        known = 0
        while known < depth and names[known] in self._blocks:
            known += 1
        last = self._blocks[names[known - 1]] if known else None
        if last is not None:
            self._touch(last)
            if known == depth and last.fork is not None:
                return
        if cache.divisible:
            self._insert_blocks(names[:depth], known, _Fork(cache.fork_beginning(number, depth)))
        else:
            self._insert_state(names[:depth], known, number)
        while self._max_forks is not None and not cache.divisible and self._forks > self._max_forks:
            self.evict()
        self._budget.keep()

    def evict(self) -> bool:
        """Give back the block that wasn't used for the longest time; returns whether there was one."""
        while self._leaves:
            entry = heapq.heappop(self._leaves)
            if self._is_current(*entry):
                self._remove(entry[2])
                return True
        return False

    def clear(self) -> None:
        """Give back everything."""
        while self.evict():
            pass

    def _insert_blocks(self, names: Sequence[bytes], known: int, fork: _Fork) -> None:
        """Add the blocks behind the first ``known``, all held by one fork."""
        parent = self._blocks[names[known - 1]] if known else None
        for depth, name in enumerate(names[known:], known + 1):
            parent = self._add(name, depth, parent)
            parent.fork, parent.bytes = fork, PAGE * self._cache.bytes_per_token
            self.bytes += parent.bytes
        fork.blocks = len(names) - known
        self._forks += 1
        assert parent is not None
        self._touch(parent)

    def _insert_state(self, names: Sequence[bytes], known: int, number: int) -> None:
        """Add a fork of a sequence as it is, at the last block."""
        block = self._blocks[names[known - 1]] if known else None
        for depth, name in enumerate(names[known:], known + 1):
            block = self._add(name, depth, block)
        assert block is not None
        block.fork = _Fork(self._cache.fork(number), 1)
        # pages that an earlier state holds already count again: a bound, and windows move what they keep
        block.bytes = self._cache.bytes_of(block.fork.number)
        self.bytes += block.bytes
        self._forks += 1
        self._touch(block)

    def _add(self, name: bytes, depth: int, parent: _Block | None) -> _Block:
        block = self._blocks[name] = _Block(name, depth, parent)
        if parent is not None:
            parent.children += 1
        return block

    def _touch(self, block: _Block) -> None:
        """A text that ends with this block was used now."""
        now = next(self._ticks)
        at: _Block | None = block
        while at is not None:
            at.used = now
            at = at.parent
        if not block.children:
            self._push(block)

    def _push(self, leaf: _Block) -> None:
        if len(self._leaves) > 2 * len(self._blocks) + PAGE:  # most entries are stale
            self._leaves = [entry for entry in self._leaves if self._is_current(*entry)]
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (leaf.used, next(self._entries), leaf))

    def _is_current(self, used: int, entry: int, block: _Block) -> bool:
        """Whether an entry of the heap is a leaf's last use."""
        return not block.children and block.used == used and self._blocks.get(block.name) is block

    def _remove(self, block: _Block) -> None:
        """Forget a leaf, and the blocks before it that nothing can be taken up from any more."""
        at: _Block | None = block
        while at is not None and not at.children and (at is block or at.fork is None):
            del self._blocks[at.name]
            if at.parent is not None:
                at.parent.children -= 1
            at = at.parent
        if at is not None and not at.children:
            self._push(at)
        if (fork := block.fork) is None:
            return
        self.bytes -= block.bytes
        fork.blocks -= 1
        if fork.blocks:
            self._cache.truncate(fork.number, block.depth - 1)
        else:
            self._cache.free([fork.number])
            self._forks -= 1
