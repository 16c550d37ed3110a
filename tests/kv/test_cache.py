"""The contiguous cache: what goes in comes out at its position, and memory is what it says."""

from __future__ import annotations

import pytest
import torch

from quantkit.errors import UsageError
from quantkit.kv.cache import FIRST, KVCache
from quantkit.models.architecture import parse_config

LAYERS, HEADS, DIM = 3, 2, 8


@pytest.fixture
def make_cache():
    config = parse_config({"model_type": "llama", "vocab_size": 10, "hidden_size": 32, "intermediate_size": 8,
                           "num_hidden_layers": LAYERS, "num_attention_heads": 4, "head_dim": DIM,
                           "num_key_value_heads": HEADS})
    return lambda batch, most=1000, dtype=torch.float32: KVCache(config, batch, most, dtype)


def content(positions, layer):
    """Keys that say where they belong: row, position and layer can be read off each."""
    rows = torch.arange(positions.shape[0])[:, None]
    code = (rows * 10_000 + positions * 10 + layer).float()
    return code[:, None, :, None].expand(-1, HEADS, -1, DIM).contiguous()


def feed(cache, positions, order=range(LAYERS)):
    results = {}
    for layer in order:
        k = content(positions, layer)
        results[layer] = cache.update(layer, k, -k, positions)
    return results


def check(cache, results, names):
    """Every sequence holds exactly positions 0 … length - 1 of its own, in every layer."""
    for layer, (keys, values, positions) in results.items():
        assert keys.shape == values.shape == (cache.batch, HEADS, max(cache.lengths), DIM)
        assert torch.isfinite(keys).all() and torch.isfinite(values).all()
        for row, (name, length) in enumerate(zip(names, cache.lengths, strict=True)):
            held = positions[row] >= 0
            assert positions[row][held].tolist() == list(range(length))
            wanted = torch.tensor([name * 10_000 + p * 10 + layer for p in range(length)]).float()
            assert torch.equal(keys[row, :, held], wanted[None, :, None].expand(HEADS, -1, DIM))
            assert torch.equal(values[row, :, held], -keys[row, :, held])


def test_ragged_prefill_then_decode(make_cache):
    cache = make_cache(3)
    prompt = torch.tensor([[0, 1, 2, 3], [0, 1, -1, -1], [0, -1, -1, -1]])
    check(cache, feed(cache, prompt), [0, 1, 2])
    assert cache.lengths == [4, 2, 1]
    for _ in range(FIRST):  # past the first allocation
        positions = cache.next_positions()
        check(cache, feed(cache, positions), [0, 1, 2])
    assert cache.lengths == [4 + FIRST, 2 + FIRST, 1 + FIRST]


def test_layers_in_any_order_are_one_step(make_cache):
    cache = make_cache(1)
    feed(cache, torch.tensor([[0, 1]]), order=(2, 0, 1))
    results = feed(cache, cache.next_positions(3), order=(1, 2, 0))
    assert cache.lengths == [5]
    check(cache, results, [0])


def test_a_finished_sequence_sits_out_as_padding(make_cache):
    cache = make_cache(2, most=5)
    feed(cache, torch.tensor([[0, 1, 2, 3, 4], [0, 1, -1, -1, -1]]))
    for position in (2, 3, 4):
        check(cache, feed(cache, torch.tensor([[-1], [position]])), [0, 1])
    assert cache.lengths == [5, 5]


def test_bytes_are_those_that_exist(make_cache):
    cache = make_cache(2, most=150, dtype=torch.bfloat16)
    assert cache.allocated_bytes == 0

    def expected(capacity):
        return LAYERS * 2 * 2 * HEADS * capacity * DIM * 2 + 2 * capacity * 8

    feed(cache, cache.next_positions(3))
    assert (cache.capacity, cache.allocated_bytes) == (FIRST, expected(FIRST))
    feed(cache, cache.next_positions(FIRST))
    assert (cache.capacity, cache.allocated_bytes) == (2 * FIRST, expected(2 * FIRST))
    feed(cache, cache.next_positions(80))
    assert (cache.capacity, cache.allocated_bytes) == (150, expected(150))


def test_full_is_an_error_that_says_so(make_cache):
    cache = make_cache(1, most=4)
    feed(cache, cache.next_positions(4))
    with pytest.raises(UsageError, match="5 tokens") as caught:
        feed(cache, cache.next_positions())
    assert "4" in caught.value.why and caught.value.next
    assert cache.lengths == [4]


def test_select_and_drop_keep_what_they_should(make_cache):
    cache = make_cache(4)
    prompt = torch.arange(100).expand(4, 100).clone()
    for row, length in enumerate((100, 3, 7, 5)):
        prompt[row, length:] = -1
    feed(cache, prompt)
    before = cache.allocated_bytes
    cache.drop([0])
    assert cache.lengths == [3, 7, 5] and cache.allocated_bytes < before / 2
    cache.select([2, 0])
    assert cache.lengths == [5, 3] and cache.batch == 2
    positions = cache.next_positions()
    assert positions.tolist() == [[5], [3]]
    names = torch.tensor([3, 1])  # the sequences that are left, by their first row
    results = {}
    for layer in range(LAYERS):
        code = (names[:, None] * 10_000 + positions * 10 + layer).float()
        k = code[:, None, :, None].expand(-1, HEADS, -1, DIM)
        results[layer] = cache.update(layer, k, -k, positions)
    check(cache, results, [3, 1])
    cache.select([])
    assert cache.batch == 0


def test_select_of_everything_changes_nothing(make_cache):
    cache = make_cache(2)
    feed(cache, cache.next_positions(2))
    before = cache.allocated_bytes
    cache.select([0, 1])
    assert cache.allocated_bytes == before
    with pytest.raises(IndexError):
        cache.drop([2])


@pytest.mark.parametrize("positions", [[[-1, 0]], [[0, -1, 1]]])
def test_padding_before_a_token_is_refused(make_cache, positions):
    with pytest.raises(ValueError, match="padding"):
        feed(make_cache(1), torch.tensor(positions))


def test_another_batch_is_refused(make_cache):
    with pytest.raises(ValueError, match="2 sequences for a cache of 1"):
        feed(make_cache(1), torch.zeros(2, 1, dtype=torch.int64))
