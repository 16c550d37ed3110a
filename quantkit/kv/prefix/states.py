"""Prefixes of a cache in which a sequence's state differs from place to place: it can be taken up only where
a fork of it was kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.kv.base import PAGE
from quantkit.kv.cache import KVCache
from quantkit.kv.prefix.base import PrefixBudget, PrefixCache, PrefixMatch


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
        cache, budget: see :class:`~quantkit.kv.prefix.base.PrefixCache`.
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
        """See the base class. A bound: running sequences and other states may hold some of it too."""
        return self._bytes

    def match(self, names: Sequence[bytes], tokens: int, step: int = PAGE) -> PrefixMatch | None:
        """See the base class."""
        for name in reversed(names[:tokens // PAGE]):
            state = self._states.get(name)
            if state is not None and state.tokens % step == 0:
                self._states[name] = self._states.pop(name)
                return PrefixMatch(state.tokens, name)
        return None

    def take(self, match: PrefixMatch, max_length: int) -> int:
        """See the base class."""
        number = self._cache.fork(self._states[match.name].number)
        self._cache.sequence(number).max_length = max_length
        return number

    def insert(self, names: Sequence[bytes], number: int) -> None:
        """See the base class. Keeps the state after the last token if that is the last of a block."""
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
        """See the base class. States are independent of running sequences."""

    def evict(self, pages: int = 1) -> bool:
        """See the base class. One state goes, however many pages it has by itself."""
        if not self._states:
            return False
        self._cache.free([self._states.pop(next(iter(self._states))).number])
        self._count()
        return True

    def clear(self) -> None:
        """See the base class."""
        self._cache.free([state.number for state in self._states.values()])
        self._states = {}
        self._bytes = 0

    def spare_pages(self) -> Sequence[int]:
        """See the base class."""
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
