"""A cache of a fixed size: what was reserved is there when it is taken, and nothing moves."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from quantkit.kv.cache import KVCache
from quantkit.kv.spec import parse_kv
from quantkit.models.architecture import parse_config
from quantkit.runtime.memory.kv import footprint
from quantkit.runtime.page_reservation import PageReservation
from quantkit.support.errors import UsageError

CHUNK = 64


@pytest.fixture
def config():
    return parse_config({"model_type": "llama", "vocab_size": 320, "hidden_size": 64, "head_dim": 32,
                         "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                         "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
                         "max_position_embeddings": 1024, "tie_word_embeddings": True})


def grow(cache, row, prompt, tokens):
    """Take a sequence through its prompt and its answer, without a model."""
    held = cache.sequence(row)
    steps = [min(CHUNK, prompt - at) for at in range(0, prompt, CHUNK)] + [1] * (tokens - prompt)
    for count in steps:
        cache.reserve(held, count)
        cache.advance(held, count)


def begun(cache, reservation, tokens):
    """A new sequence with its pages reserved; ``None`` if there aren't enough."""
    row = cache.add(tokens)
    reservation.reserve(row, tokens)
    if reservation.make_room(None):
        return row
    reservation.release(row)
    cache.free([row])
    return None


@pytest.mark.parametrize("kv", ["none", "int8", "int4"])
def test_what_fits_never_moves_a_page(config, kv):
    cache = KVCache(config, parse_kv(kv), torch.float32)
    one = KVCache(config, parse_kv(kv), torch.float32)
    grow(one, one.add(), 300, 1000)
    size = (6 if kv == "int4" else 2) * one.allocated_bytes  # there most are vectors that wait
    reservation = PageReservation(cache, size, 4, 1024, CHUNK)
    before, moves, rows = cache.allocated_bytes, cache.move_counter.count, []
    assert before <= size
    while len(rows) < 4 and (row := begun(cache, reservation, 500)) is not None:
        rows.append(row)
    assert len(rows) >= 2
    for row in rows:
        grow(cache, row, 200, 500)
    assert cache.allocated_bytes == before and cache.move_counter.count == moves
    cache.free(rows[:1])
    reservation.release(rows[0])
    assert begun(cache, reservation, 500) is not None
    assert cache.move_counter.count == moves and cache.allocated_bytes == before


@pytest.mark.parametrize("kv", ["int4", "rotation(3)", "int8/int4"])
@pytest.mark.parametrize("seed", range(4))
def test_prompts_side_by_side_share_a_steps_tokens(config, kv, seed):
    """Cut wherever: they begin pages of their own, and none moves."""
    draw, lengths = random.Random(seed), [300, 411, 95]
    cache = KVCache(config, parse_kv(kv), torch.float32)
    reservation = PageReservation(cache, 10**7, 4, 1024, CHUNK, len(lengths))
    moves = cache.move_counter.count
    left = {begun(cache, reservation, 600): length for length in lengths}
    decoding = begun(cache, reservation, 1000)
    grow(cache, decoding, 30, 900)
    while left:
        counts, budget = {decoding: 1}, CHUNK
        for row in draw.sample([*left], len(left)):
            counts[row] = min(left[row], budget, draw.choice([1, 13, CHUNK]))
            left[row], budget = left[row] - counts[row], budget - counts[row]
        for row, count in counts.items():
            cache.reserve(cache.sequence(row), count)
        for row, count in counts.items():
            cache.advance(cache.sequence(row), count)
        left = {row: count for row, count in left.items() if count}
    assert cache.move_counter.count == moves


def test_after_its_prompt_a_sequence_needs_what_is_left_of_it(config):
    """And what its answer takes."""
    cache = KVCache(config, parse_kv("snapkv(64)"), torch.float32)
    reservation = PageReservation(cache, 24 * 64 * cache.bytes_per_token + 10**6, 4, 1024, CHUNK)
    rows = []
    while len(rows) < 4 and (row := begun(cache, reservation, 960)) is not None:
        rows.append(row)
        if len(rows) == 1:
            assert begun(cache, reservation, 960) is None
        held = cache.sequence(rows[-1])
        cache.reserve(held, 900)
        cache.advance(held, 900)
        for store, layer in zip((layer.store for layer in cache.layers), held.layers):
            store.keep_slots(layer, [torch.arange(64)] * cache.heads)
        reservation.shrink_to_answer(rows[-1])
    assert len(rows) >= 3
    for row in rows:
        cache.reserve(cache.sequence(row), 60)
        assert all(len(pages) <= 2 for layer in cache.sequence(row).layers for pages in layer.pages)
    assert cache.move_counter.count == len(cache.layers)


@pytest.mark.parametrize("kv", ["snapkv(0.5)+int4", "snapkv(0.5)+rotation(3)"])
def test_what_is_encoded_again_never_waits_in_between(config, kv):
    """Pages of vectors are few: what stays of a long text has no reservation there."""
    cache = KVCache(config, parse_kv(kv), torch.float32)
    PageReservation(cache, 10**8, 1, 1024, CHUNK)
    moves, row = cache.move_counter.count, cache.add(1024)
    grow(cache, row, 960, 960)
    for store, layer in zip((layer.store for layer in cache.layers), cache.sequence(row).layers):
        store.keep_slots(layer, [torch.arange(0, 960, 2)] * cache.heads)
    assert cache.move_counter.count == moves and cache.slots(row) == [(480, 480)] * 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kv", ["h2o(0.5, interval=640)", "tova(0.5, interval=640)", "snapkv(0.5)"])
def test_no_prompt_needs_more_than_was_looked_at(config, kv):
    config = dataclasses.replace(config, max_position_embeddings=2048)
    cache = KVCache(config, parse_kv(kv), torch.float32)
    reservation = PageReservation(cache, 10**8, 1, 2048, CHUNK)
    for prompt in range(64, 2048, 128):
        found = footprint(config, parse_kv(kv), torch.float32, 2048, prompt, CHUNK).groups[0]
        filling, decoding = reservation._limits[0]
        assert found.peak.codes <= filling and found.decoding.codes <= decoding


def test_all_that_can_ever_be_needed_is_enough(config):
    cache = KVCache(config, parse_kv("none"), torch.float32)
    PageReservation(cache, 10**12, 2, 1024, CHUNK)
    assert cache.allocated_bytes == 2 * 1024 * cache.bytes_per_token


def test_layers_with_a_window_have_theirs_whole(config):
    config = dataclasses.replace(config, num_layers=2, sliding_windows=(None, 64))
    cache = KVCache(config, parse_kv("none"), torch.float32)
    size = 900 * cache.bytes_per_token
    reservation = PageReservation(cache, size, 2, 1024, CHUNK)
    full, window = (store.pages for store in [layer.store for layer in cache.layers])
    assert full.allocated_bytes + window.allocated_bytes <= size
    tokens = full.allocated_bytes // (full.page_bytes * cache.heads) * 64
    assert 512 < tokens < 1024 and reservation.tokens == tokens
    assert window.allocated_bytes > full.page_bytes * cache.heads * (64 + 256) // 64


def test_what_does_not_fit_says_how_much_would(config):
    cache = KVCache(config, parse_kv("none"), torch.float32)
    reservation = PageReservation(cache, 512 * cache.bytes_per_token, 4, 1024, CHUNK)
    assert reservation.tokens == 512
    reservation.check(512)
    with pytest.raises(UsageError, match="513 tokens don't fit") as caught:
        reservation.check(513)
    assert "512" in caught.value.why
    with pytest.raises(UsageError, match="too few"):
        PageReservation(KVCache(config, parse_kv("int4"), torch.float32), 1000, 4, 1024, CHUNK)
