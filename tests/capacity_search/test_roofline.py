"""Bytes and operations of a step, and where it turns, against hand counts and a search over every batch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from quantkit.capacity_search.roofline import Ceilings, compute_bound_batch, decode_step
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import parse_kv
from quantkit.models.architecture import parse_config
from quantkit.runtime.cpu.model import reason_against
from quantkit.runtime.memory.kv import footprint
from quantkit.runtime.memory.weights import unquantized
from quantkit.sources.open import open_source


def of(uri, context=512, kv="none"):
    weights = unquantized(open_source(uri), reason_against)
    return weights, footprint(weights.config, parse_kv(kv), weights.dtype, context, context // 2, 512)


def test_a_step_is_counted():
    weights, found = of("synthetic:llama-8b", 4096)
    one = decode_step(weights, found, Ceilings(100e9, 1e12, {}), 3)
    linears = 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336) + 128256 * 4096
    assert one.weight_bytes == 2 * linears  # the embedding is looked up, not read
    assert one.kv_bytes == 3 * 4096 * 32 * 8 * 2 * 128 * 2
    assert one.flops == 3 * 2 * (linears + 2 * 32 * 128 * 4096 * 32)
    assert one.memory_s == pytest.approx((one.weight_bytes + one.kv_bytes) / 100e9)
    assert one.compute_s == pytest.approx(one.flops / 1e12)
    assert one.bound == "memory" and one.tokens_s == pytest.approx(3 / one.memory_s)


@pytest.mark.parametrize("kv", ["none", "int8", "int4", "rotation(2)", "int2(residual_length=100, sinks=70)"])
@pytest.mark.parametrize("context", [100, 1000])
def test_no_step_reads_less_than_the_cache_says(kv, context):
    """Vectors that wait are read as they are: at least as many as never are codes."""
    config = parse_config({"model_type": "llama", "vocab_size": 320, "hidden_size": 64, "head_dim": 32,
                           "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 2})
    weights, _ = of("synthetic:llama-1b")
    weights = dataclasses.replace(weights, config=config)
    found = footprint(config, parse_kv(kv), torch.bfloat16, context, context // 2, 512)
    cache = KVCache(config, parse_kv(kv), torch.bfloat16)
    row = cache.add()
    for store, layer in zip((layer.store for layer in cache.layers), cache.sequence(row).layers):
        store.allocate(layer, context)
    read = decode_step(weights, found, Ceilings(1e11, 1e12, {}), 1).kv_bytes
    spare = 64 * cache.residual_bytes_per_token  # of the newest page, which fills
    assert read <= cache.step_bytes(row) <= read + spare


@pytest.mark.sampled(3)
@pytest.mark.parametrize("uri", ["synthetic:llama-8b", "synthetic:mixtral-8x7b", "synthetic:gemma3-1b"])
@pytest.mark.parametrize("intensity", [1, 3, 10, 100, 1000])
@pytest.mark.parametrize("context", [64, 4096])
def test_the_batch_where_it_turns(uri, intensity, context):
    weights, found = of(uri, context)
    ceilings = Ceilings(1e11, intensity * 1e11, {})
    turn = compute_bound_batch(weights, found, ceilings)
    bounds = [decode_step(weights, found, ceilings, batch).bound for batch in range(1, 300)]
    if turn is None or turn >= 300:
        assert set(bounds) == {"memory"}
    else:
        assert bounds == ["memory"] * (turn - 1) + ["compute"] * (300 - turn)


def test_where_a_cache_takes_longer_to_read_than_to_use_it_never_turns():
    weights, found = of("synthetic:llama-8b", 8192)
    # of keys and values 4 query heads share each number of 2 bytes: 4 operations a byte
    assert compute_bound_batch(weights, found, Ceilings(1e11, 100e11, {})) is None
    assert compute_bound_batch(weights, found, Ceilings(1e11, 3e11, {})) is not None


def test_a_window_of_the_models_own_is_all_that_is_held_and_read():
    weights, found = of("synthetic:gemma3-1b", 4096)
    one = decode_step(weights, found, Ceilings(1e11, 1e12, {}), 1)
    full = sum(window is None for window in weights.config.sliding_windows)
    assert 0 < full < 26
    vectors = 2 * 256 * 2
    assert one.kv_bytes == pytest.approx(full * 4096 * vectors + (26 - full) * 512 * (vectors + 4))
    # 256 of a window's slots are given back at a time, at every 64th step; each has a position beside it
    assert found.sequence_bytes == full * 4096 * vectors + (26 - full) * (512 + 256) * (vectors + 4)


def test_a_smaller_cache_is_read_faster():
    weights, plain = of("synthetic:llama-1b", 4096)
    _, coded = of("synthetic:llama-1b", 4096, "int8")
    ceilings = Ceilings(1e11, 1e13, {})
    smaller, larger = (decode_step(weights, cache, ceilings, 4).kv_bytes for cache in (coded, plain))
    assert smaller < 0.55 * larger
    assert weights.dtype is torch.bfloat16
