"""Attention against a loop over queries in float64, with holes, padding, windows and chunks."""

from __future__ import annotations

import pytest
import torch

from quantkit.ops import attention as module
from quantkit.ops.attention import Visibility, attention


def slow(q, keys, values, positions, key_positions, window):
    """One query and head at a time, float64; NaN where nothing is seen."""
    out = torch.full(q.shape, float("nan"), dtype=torch.float64)
    group = q.shape[1] // keys.shape[1]
    for b in range(q.shape[0]):
        for t in range(q.shape[2]):
            p = int(positions[b, t])
            seen = [s for s, kp in enumerate(key_positions[b].tolist())
                    if kp >= 0 and kp <= p and (window is None or kp > p - window)]
            if not seen:
                continue
            for h in range(q.shape[1]):
                k, v = (x[b, h // group, seen].double() for x in (keys, values))
                weights = torch.softmax(k @ q[b, h, t].double() * q.shape[3] ** -0.5, 0)
                out[b, h, t] = weights @ v
    return out


def make(batch, heads, kv, queries, slots, dim, dtype=torch.float32, seed=0):
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, h, n, dim, generator=random).to(dtype)
            for h, n in ((heads, queries), (kv, slots), (kv, slots))]


def scattered(batch, slots, seed=0):
    """Key positions out of order, with holes and empty slots."""
    random = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(2 * slots, generator=random)[:slots] for _ in range(batch)]
    keys = torch.stack(rows)
    keys[:, slots // 2:: 3] = -1
    return keys


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize(("heads", "kv", "dim"), [(4, 4, 8), (6, 2, 16), (3, 1, 6), (9, 3, 64)])
@pytest.mark.parametrize("queries", [1, 2, 13])
def test_error_rule(monkeypatch, obeys_the_rule, dtype, window, heads, kv, dim, queries):
    monkeypatch.setattr(module, "CHUNK", 5)
    q, k, v = make(2, heads, kv, queries, 19, dim, dtype)
    key_positions = scattered(2, 19)
    positions = torch.stack([row[row >= 0].sort().values[-queries:].flip(0) for row in key_positions])
    if positions.shape[1] < queries:
        pytest.skip("fewer keys than queries")
    got = attention(q, k, v, Visibility(positions, key_positions, window))
    # plain torch in the same precision: the textbook lines, with torch's rounding after each
    mask = (key_positions[:, None] >= 0) & (key_positions[:, None] <= positions[..., None])
    if window is not None:
        mask &= key_positions[:, None] > positions[..., None] - window
    wide = [x.repeat_interleave(heads // kv, 1) for x in (k, v)]
    scores = (q @ wide[0].transpose(2, 3) * dim**-0.5).masked_fill(~mask[:, None], float("-inf"))
    plain = torch.softmax(scores, -1, dtype=torch.float32).to(dtype) @ wide[1]
    exact = slow(q, k, v, positions, key_positions, window)
    assert not exact.isnan().any()
    obeys_the_rule(got, plain, exact)


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padding_and_empty_caches_are_finite_and_harmless(queries, dtype):
    q, k, v = make(3, 4, 2, queries, 6, 8, dtype)
    key_positions = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, -1, -1, -1, -1], [-1] * 6])
    positions = torch.tensor([[5], [1], [-1]]).expand(3, queries).clone()
    if queries > 1:
        positions[0, 2:] = -1
    got = attention(q, k, v, Visibility(positions, key_positions))
    assert torch.isfinite(got).all()
    seen = Visibility(positions[1:2], key_positions[1:2, :2])
    alone = attention(q[1:2], k[1:2, :, :2], v[1:2, :, :2], seen)
    assert torch.allclose(got[1].float(), alone[0].float(), atol=1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("queries", [1, 5])
def test_what_stands_in_empty_slots_has_no_effect(queries):
    q, k, v = make(1, 4, 2, queries, 8, 8)
    key_positions = torch.tensor([[0, 1, 2, -1, 3, 4, -1, -1]])
    positions = torch.arange(5 - queries, 5)[None]
    before = attention(q, k, v, Visibility(positions, key_positions))
    for slot in (3, 6, 7):
        k[:, :, slot], v[:, :, slot] = 1e4, -1e4
    assert torch.equal(before, attention(q, k, v, Visibility(positions, key_positions)))


def test_large_scores_do_not_overflow():
    q, k, v = make(1, 2, 2, 3, 3, 8)
    got = attention(q * 1e4, k * 1e4, v, Visibility(torch.arange(3)[None], torch.arange(3)[None]))
    assert torch.isfinite(got).all()


def test_masks_stay_small_and_chunks_skip_unseen_keys(monkeypatch):
    monkeypatch.setattr(module, "MASK_ELEMENTS", 64)
    monkeypatch.setattr(module, "CHUNK", 8)
    positions = torch.arange(32)[None]
    seen = Visibility(positions, positions, 4)
    assert seen.rows == 2
    for start in range(0, 32, seen.rows):
        low, high, bias = seen.chunk(start, torch.float32)
        assert (low, high) == (max(0, start - 3), start + 2)
        assert bias is None or bias.shape == (1, 1, 2, high - low)
    q, k, v = make(1, 2, 1, 32, 32, 8)
    exact = slow(q, k, v, positions, positions, 4)
    assert torch.allclose(attention(q, k, v, seen).double(), exact, atol=1e-5)


def test_decode_reads_the_cache_in_place():
    """No copy of keys or values: what is allocated doesn't grow with the cache."""
    from torch.profiler import ProfilerActivity, profile

    q, k, v = make(1, 9, 3, 1, 4096, 64, torch.bfloat16)
    seen = Visibility(torch.tensor([[4095]]), torch.arange(4096)[None])
    seen.chunk(0, torch.bfloat16)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        attention(q, k, v, seen)
    allocated = max(abs(e.self_cpu_memory_usage) for e in profiled.events())
    assert allocated < k.numel() * k.element_size() / 4
