"""The radix tree: what it finds, what it holds, and what it gives back first."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.prefix_cache import PrefixBudget, PrefixCache, block_names
from quantkit.kvspec import parse_kv
from quantkit.models.architecture import parse_config


@pytest.fixture(scope="module")
def config():
    return parse_config({"model_type": "llama", "vocab_size": 320, "hidden_size": 64, "head_dim": 32,
                         "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                         "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
                         "max_position_embeddings": 4096, "tie_word_embeddings": True})


def begun(cache, count):
    """A sequence that has had ``count`` tokens."""
    number = cache.add()
    (sequence,) = Batch(cache, [number]).sequences
    if count:
        cache.reserve(sequence, count)
        cache.settle(sequence, count)
    return number


def text(*parts):
    """Tokens of blocks that are named by a number each, and a rest."""
    return [token for part in parts for token in range(part, part + 64)]


def test_a_block_s_name_says_all_tokens_before_it():
    one, other = block_names(text(1, 2, 3)), block_names(text(1, 9, 3))
    assert len(one) == 3 and one[0] == other[0]
    assert one[1] != other[1] and one[2] != other[2]
    assert block_names(text(1, 2, 3)[:191], salt=b"x")[0] != one[0]
    assert block_names([*text(1, 2, 3), 7, 8], one[:1]) == one
    assert block_names(range(63)) == []


@pytest.mark.parametrize("kv", ["none", "int8"])
def test_every_block_of_a_text_is_found_and_shared(config, kv):
    cache = KVCache(config, parse_kv(kv), torch.float32)
    prefixes = PrefixCache(cache, None)
    number, names = begun(cache, 200), block_names(text(1, 2, 3, 4)[:200])
    prefixes.insert(names, number)
    block = 64 * cache.bytes_per_token
    assert len(prefixes) == 3 and prefixes.bytes == 3 * block
    cache.free([number])
    assert cache.used_bytes == 3 * block
    match = prefixes.match(block_names(text(1, 2, 8)), 191)
    assert match.tokens == 128 and match.pages == 2
    assert prefixes.match(block_names(text(1, 2, 3)), 191).tokens == 128, "the last token is computed"
    assert prefixes.match(names, 192, step=128).tokens == 128
    assert prefixes.match(block_names(text(5)), 64) is None
    taken = prefixes.take(match, 999)
    assert cache.seen(taken) == 128 and cache.used_bytes == 3 * block
    assert cache.sequence(taken).max_length == 999
    assert cache.slots(taken) == [(128, 128)] * 2
    prefixes.clear()
    assert cache.used_bytes == 2 * block and len(prefixes) == prefixes.bytes == 0
    cache.free([taken])
    assert cache.allocated_bytes == 0 and cache.numbers == ()


def test_branches_hold_what_they_share_once_and_the_oldest_leaf_goes_first(config):
    cache = KVCache(config, parse_kv("none"), torch.float32)
    prefixes, block = PrefixCache(cache, None), 64 * cache.bytes_per_token
    first, second = text(1, 2, 3), text(1, 2, 4)
    number = begun(cache, 192)
    prefixes.insert(block_names(first), number)
    cache.free([number])
    number = prefixes.take(prefixes.match(block_names(second), 191), 0)
    (sequence,) = Batch(cache, [number]).sequences
    cache.reserve(sequence, 64)
    cache.settle(sequence, 64)
    prefixes.insert(block_names(second), number)
    cache.free([number])
    assert len(prefixes) == 4 and cache.used_bytes == prefixes.bytes == 4 * block
    prefixes.match(block_names(first), 192)
    assert prefixes.evict() and prefixes.match(block_names(second), 192).tokens == 128
    assert prefixes.match(block_names(first), 192).tokens == 192 and cache.used_bytes == 3 * block
    for left in (128, 64, 0):
        assert prefixes.evict() and cache.used_bytes == block * (left // 64)
        match = prefixes.match(block_names(first), 192)
        assert (match.tokens if match else 0) == left
    assert not prefixes.evict() and cache.allocated_bytes == 0


def test_the_limit_is_kept(config):
    cache = KVCache(config, parse_kv("none"), torch.float32)
    block = 64 * cache.bytes_per_token
    prefixes = PrefixCache(cache, 5 * block)
    for seed in range(1, 9):
        number = begun(cache, 128)
        prefixes.insert(block_names(text(seed, seed + 100)), number)
        cache.free([number])
        assert prefixes.bytes <= 5 * block and cache.used_bytes == prefixes.bytes
    assert prefixes.match(block_names(text(8, 108)), 128).tokens == 128
    assert prefixes.match(block_names(text(1, 101)), 128) is None


@pytest.mark.parametrize("kv", ["int4", "window(100)", "h2o(0.5)"])
def test_other_caches_are_taken_up_where_a_state_was_kept(config, kv):
    cache = KVCache(config, parse_kv(kv), torch.float32)
    prefixes = PrefixCache(cache, None, max_forks=2)
    names = block_names(text(1, 2, 3, 4))
    number = begun(cache, 128)
    prefixes.insert(names, number)
    assert not cache.divisible and prefixes.match(names, 255).tokens == 128
    assert prefixes.match(names, 255).pages == 0 and prefixes.match(names, 127) is None
    odd = begun(cache, 100)
    prefixes.insert(block_names(text(7, 8)), odd)
    assert prefixes.match(block_names(text(7, 8)), 128) is None, "between two blocks"
    for seed in (11, 12):
        other = begun(cache, 64)
        prefixes.insert(block_names(text(seed)), other)
        cache.free([other])
    assert prefixes.match(names, 255) is None and prefixes.match(block_names(text(12)), 64).tokens == 64
    cache.free([number, odd])
    prefixes.clear()
    assert cache.allocated_bytes == 0 and len(prefixes) == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(1, 3), min_size=1, max_size=5), st.booleans()), max_size=25),
       st.sampled_from(["none", "int8", "int4"]), st.integers(1, 9))
def test_whatever_comes_and_goes_the_count_is_right(config, steps, kv, limit):
    """Against a set of texts: what is found was inserted, and bytes are those that are held."""
    cache = KVCache(config, parse_kv(kv), torch.float32)
    prefixes = PrefixCache(cache, limit * 70 * cache.bytes_per_token + limit * 10**5)
    inserted, taken = set(), []
    for blocks, evicts in steps:
        tokens = text(*blocks)
        names = block_names(tokens)
        match = prefixes.match(names, len(tokens))
        known = 0 if match is None else match.tokens
        assert known == 0 or tuple(tokens[:known]) in inserted
        number = cache.add() if match is None else prefixes.take(match, 0)
        assert cache.seen(number) == known
        (sequence,) = Batch(cache, [number]).sequences
        if len(tokens) > known:
            cache.reserve(sequence, len(tokens) - known)
            cache.settle(sequence, len(tokens) - known)
        prefixes.insert(names, number)
        inserted |= {tuple(tokens[:end]) for end in range(64, len(tokens) + 1, 64)}
        taken.append(number)
        if evicts:
            prefixes.evict()
            cache.free([taken.pop(0)])
        if cache.divisible:
            assert prefixes.bytes == 64 * len(prefixes) * cache.bytes_per_token
    cache.free(taken)
    if cache.divisible:
        assert cache.used_bytes == prefixes.bytes
    prefixes.clear()
    assert cache.allocated_bytes == 0 and prefixes.bytes == len(prefixes) == 0


def test_several_caches_share_a_budget(config):
    """And whoever holds most gives first."""
    caches = [KVCache(config, parse_kv("none"), torch.float32) for _ in range(2)]
    block = 64 * caches[0].bytes_per_token
    budget = PrefixBudget(6 * block)
    first, second = (PrefixCache(cache, budget) for cache in caches)

    def insert(prefixes, cache, *parts):
        number = begun(cache, 64 * len(parts))
        prefixes.insert(block_names(text(*parts)), number)
        cache.free([number])

    for seed in range(1, 4):
        insert(first, caches[0], seed, seed + 10)
    assert first.bytes == 6 * block
    insert(second, caches[1], 50, 51)
    assert (first.bytes, second.bytes) == (4 * block, 2 * block)
    assert first.match(block_names(text(1, 11)), 128) is None
    for seed in range(60, 64):
        insert(second, caches[1], seed)
    assert first.bytes + second.bytes == 6 * block and abs(first.bytes - second.bytes) <= 2 * block
    del first
    insert(second, caches[1], 70, 71, 72)
    assert second.bytes == 6 * block, "what is gone counts no more"
