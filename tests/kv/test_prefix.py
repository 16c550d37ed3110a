"""Prefixes: what is found, what is held, and what is given back first."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.prefix import PrefixBudget, block_names, build_prefix_cache
from quantkit.kv.spec import parse_kv
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
        cache.advance(sequence, count)
    return number


def ended(prefixes, cache, *numbers):
    """Sequences end."""
    for number in numbers:
        prefixes.release(number)
        cache.free([number])


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
    prefixes = build_prefix_cache(cache, PrefixBudget(None))
    number, names = begun(cache, 200), block_names(text(1, 2, 3, 4)[:200])
    prefixes.insert(names, number)
    block = 64 * cache.bytes_per_token
    assert len(prefixes) == 3 and prefixes.held_bytes == 0, "the sequence still holds them too"
    ended(prefixes, cache, number)
    assert cache.used_bytes == prefixes.held_bytes == 3 * block
    match = prefixes.match(block_names(text(1, 2, 8)), 191)
    assert match.tokens == 128
    assert prefixes.match(block_names(text(1, 2, 3)), 191).tokens == 128, "the last token is computed"
    assert prefixes.match(names, 192, step=128).tokens == 128
    assert prefixes.match(block_names(text(5)), 64) is None
    taken = prefixes.take(match, 999)
    assert cache.seen(taken) == 128 and cache.used_bytes == 3 * block and prefixes.held_bytes == block
    assert cache.sequence(taken).max_length == 999
    assert cache.slots(taken) == [(128, 128)] * 2
    prefixes.clear()
    assert cache.used_bytes == 2 * block and len(prefixes) == 2 and prefixes.held_bytes == 0
    ended(prefixes, cache, taken)
    prefixes.clear()
    assert cache.allocated_bytes == 0 and cache.numbers == () and len(prefixes) == 0


def test_a_text_of_several_segments_is_put_together(config):
    """Its pages are those that were computed, in their order."""
    cache = KVCache(config, parse_kv("none"), torch.float32)
    prefixes, names = build_prefix_cache(cache, PrefixBudget(None)), block_names(text(1, 2, 3, 4, 5))
    number = begun(cache, 320)
    for blocks in (2, 3, 5):
        prefixes.insert(names[:blocks], number)
    pages = [list(map(list, state.pages)) for state in cache.sequence(number).layers]
    ended(prefixes, cache, number)
    for blocks in (5, 4, 3, 1):
        taken = prefixes.take(prefixes.match(names, 64 * blocks), 0)
        assert [state.pages for state in cache.sequence(taken).layers] == [
            [head[:blocks] for head in layer] for layer in pages]
        ended(prefixes, cache, taken)
    assert prefixes.evict(2) and len(prefixes) == 3
    prefixes.clear()
    assert cache.allocated_bytes == 0


def test_branches_hold_what_they_share_once_and_the_oldest_leaf_goes_first(config):
    cache = KVCache(config, parse_kv("none"), torch.float32)
    prefixes, block = build_prefix_cache(cache, PrefixBudget(None)), 64 * cache.bytes_per_token
    first, second = text(1, 2, 3), text(1, 2, 4)
    number = begun(cache, 192)
    prefixes.insert(block_names(first), number)
    ended(prefixes, cache, number)
    number = prefixes.take(prefixes.match(block_names(second), 191), 0)
    (sequence,) = Batch(cache, [number]).sequences
    cache.reserve(sequence, 64)
    cache.advance(sequence, 64)
    prefixes.insert(block_names(second), number)
    ended(prefixes, cache, number)
    assert len(prefixes) == 4 and cache.used_bytes == prefixes.held_bytes == 4 * block
    prefixes.match(block_names(first), 192)
    assert prefixes.evict() and prefixes.match(block_names(second), 192).tokens == 128
    assert prefixes.match(block_names(first), 192).tokens == 192 and cache.used_bytes == 3 * block
    for left in (128, 64, 0):
        assert prefixes.evict() and cache.used_bytes == block * (left // 64)
        match = prefixes.match(block_names(first), 192)
        assert (match.tokens if match else 0) == left
    assert not prefixes.evict() and cache.allocated_bytes == 0


def test_equal_texts_that_were_computed_apart_are_held_once(config):
    cache = KVCache(config, parse_kv("none"), torch.float32)
    prefixes, block = build_prefix_cache(cache, PrefixBudget(None)), 64 * cache.bytes_per_token
    numbers = [begun(cache, 128), begun(cache, 192)]
    for number in numbers:
        prefixes.insert(block_names(text(1, 2, 3)), number)
    assert cache.used_bytes == 5 * block and len(prefixes) == 3
    ended(prefixes, cache, *numbers)
    assert cache.used_bytes == prefixes.held_bytes == 3 * block


def test_what_a_running_sequence_reads_stays(config):
    """To forget it would free nothing."""
    cache = KVCache(config, parse_kv("none"), torch.float32)
    prefixes = build_prefix_cache(cache, PrefixBudget(None))
    running, other = begun(cache, 128), begun(cache, 64)
    prefixes.insert(block_names(text(1, 2)), running)
    prefixes.insert(block_names(text(3)), other)
    assert not prefixes.evict() and prefixes.spare_pages() == [0, 0]
    ended(prefixes, cache, other)
    assert prefixes.spare_pages() == [2, 2], "a page of each head"
    assert prefixes.evict(9) and not prefixes.evict()
    assert prefixes.match(block_names(text(1, 2)), 128).tokens == 128
    ended(prefixes, cache, running)
    prefixes.clear()
    assert cache.allocated_bytes == 0


def test_the_limit_is_kept(config):
    cache = KVCache(config, parse_kv("none"), torch.float32)
    block = 64 * cache.bytes_per_token
    prefixes = build_prefix_cache(cache, PrefixBudget(5 * block))
    for seed in range(1, 9):
        number = begun(cache, 128)
        prefixes.insert(block_names(text(seed, seed + 100)), number)
        ended(prefixes, cache, number)
        assert prefixes.held_bytes <= 5 * block and cache.used_bytes == prefixes.held_bytes
    assert prefixes.match(block_names(text(8, 108)), 128).tokens == 128
    assert prefixes.match(block_names(text(1, 101)), 128) is None


@pytest.mark.parametrize("kv", ["int4", "window(100)", "h2o(0.5)"])
def test_other_caches_are_taken_up_where_a_state_was_kept(config, kv):
    cache = KVCache(config, parse_kv(kv), torch.float32)
    prefixes = build_prefix_cache(cache, PrefixBudget(None), 2)
    names = block_names(text(1, 2, 3, 4))
    number = begun(cache, 128)
    prefixes.insert(names, number)
    assert not cache.divisible and prefixes.match(names, 255).tokens == 128
    assert prefixes.match(names, 127) is None
    odd = begun(cache, 100)
    prefixes.insert(block_names(text(7, 8)), odd)
    assert prefixes.match(block_names(text(7, 8)), 128) is None, "between two blocks"
    for seed in (11, 12):
        other = begun(cache, 64)
        prefixes.insert(block_names(text(seed)), other)
        ended(prefixes, cache, other)
    assert prefixes.match(names, 255) is None and prefixes.match(block_names(text(12)), 64).tokens == 64
    ended(prefixes, cache, number, odd)
    prefixes.clear()
    assert cache.allocated_bytes == 0 and len(prefixes) == prefixes.held_bytes == 0


def test_of_a_long_text_s_states_the_last_ones_stay(config):
    """The next turn of a conversation begins with them."""
    cache = KVCache(config, parse_kv("int4"), torch.float32)
    prefixes = build_prefix_cache(cache, PrefixBudget(None), 3)
    names, number = block_names(text(*range(1, 7))), cache.add()
    (sequence,) = Batch(cache, [number]).sequences
    for blocks in range(1, 7):
        cache.reserve(sequence, 64)
        cache.advance(sequence, 64)
        prefixes.insert(names[:blocks], number)
    ended(prefixes, cache, number)
    assert [(match := prefixes.match(names, tokens)) and match.tokens for tokens in (384, 320, 256, 192)] == [
        384, 320, 256, None]
    assert prefixes.held_bytes == cache.used_bytes, "what they share counts once"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(1, 3), min_size=1, max_size=5), st.booleans()), max_size=25),
       st.sampled_from(["none", "int8", "int4"]), st.integers(1, 9))
def test_whatever_comes_and_goes_the_count_is_right(config, steps, kv, limit):
    """Against a set of texts: what is found was inserted, and bytes are those that are held."""
    cache = KVCache(config, parse_kv(kv), torch.float32)
    prefixes = build_prefix_cache(cache, PrefixBudget(limit * 70 * cache.bytes_per_token + limit * 10**5))
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
            cache.advance(sequence, len(tokens) - known)
        prefixes.insert(names, number)
        inserted |= {tuple(tokens[:end]) for end in range(64, len(tokens) + 1, 64)}
        taken.append(number)
        if evicts:
            prefixes.evict()
            ended(prefixes, cache, taken.pop(0))
        if cache.divisible:
            reached = {block for number in taken for block in block_pages(cache, number)}
            pages = {page for number in cache.numbers for page in block_pages(cache, number)}
            assert prefixes.held_bytes == 64 * len(pages - reached) * cache.bytes_per_token
            assert prefixes.spare_pages() == [2 * len(pages - reached)] * 2
    ended(prefixes, cache, *taken)
    assert cache.used_bytes == prefixes.held_bytes or not cache.divisible
    prefixes.clear()
    assert cache.allocated_bytes == 0 and prefixes.held_bytes == len(prefixes) == 0


def block_pages(cache, number):
    """The pages of a head, one for each block."""
    return cache.sequence(number).layers[0].pages[0]


def test_several_caches_share_a_budget(config):
    """And whoever holds most gives first."""
    caches = [KVCache(config, parse_kv("none"), torch.float32) for _ in range(2)]
    block = 64 * caches[0].bytes_per_token
    budget = PrefixBudget(6 * block)
    first, second = (build_prefix_cache(cache, budget) for cache in caches)

    def insert(prefixes, cache, *parts):
        number = begun(cache, 64 * len(parts))
        prefixes.insert(block_names(text(*parts)), number)
        ended(prefixes, cache, number)

    for seed in range(1, 4):
        insert(first, caches[0], seed, seed + 10)
    assert first.held_bytes == 6 * block
    insert(second, caches[1], 50, 51)
    assert (first.held_bytes, second.held_bytes) == (4 * block, 2 * block)
    assert first.match(block_names(text(1, 11)), 128) is None
    for seed in range(60, 64):
        insert(second, caches[1], seed)
    assert first.held_bytes + second.held_bytes == 6 * block
    assert abs(first.held_bytes - second.held_bytes) <= 2 * block
    del first
    insert(second, caches[1], 70, 71, 72)
    assert second.held_bytes == 6 * block, "what is gone counts no more"
