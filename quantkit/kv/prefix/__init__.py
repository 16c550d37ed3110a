"""Beginnings of texts whose keys and values stay in the cache, for other texts that begin in the same way.

A text's beginning is named by a chain of hashes, one for each block of 64 tokens, so that a block's name says
all tokens before it too.
"""

from __future__ import annotations

from quantkit.kv.cache import KVCache
from quantkit.kv.prefix.base import PrefixBudget, PrefixCache, PrefixMatch, block_names
from quantkit.kv.prefix.blocks import BlockPrefixes
from quantkit.kv.prefix.states import StatePrefixes


def build_prefix_cache(cache: KVCache, budget: PrefixBudget, max_states: int | None = None) -> PrefixCache:
    """The kind of prefix cache that a KV cache can have.

    Args:
        cache: the cache whose pages it holds.
        budget: bytes that it may hold beside running sequences, shared with others.
        max_states: the largest number of states that it holds where texts can't be taken up at every block;
            ``None``: no limit.
    """
    return BlockPrefixes(cache, budget) if cache.divisible else StatePrefixes(cache, budget, max_states)


__all__ = ["PrefixBudget", "PrefixCache", "PrefixMatch", "block_names", "build_prefix_cache"]
