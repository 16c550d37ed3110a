"""Attention against a loop over queries in float64, with holes, padding, windows and chunks."""

from __future__ import annotations

import pytest
import torch

from quantkit.ops import attention as module
from quantkit.ops.attention import Visibility, attention, attention_weights


def slow(q, keys, values, positions, key_positions, window, scale=None, cap=None, sinks=None):
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
                scores = k @ q[b, h, t].double() * (scale or q.shape[3] ** -0.5)
                scores = cap * torch.tanh(scores / cap) if cap else scores
                extra = torch.empty(0) if sinks is None else sinks[h:h + 1]
                out[b, h, t] = torch.softmax(torch.cat((scores, extra.double())), 0)[:len(seen)] @ v
    return out


def terms(q, k, v, mask, out):
    """The magnitudes that a result sums: those of its values, and through its weights those of the scores."""
    scale = q.shape[3] ** -0.5
    weights = torch.softmax((q @ k.transpose(2, 3) * scale).masked_fill(~mask, float("-inf")), -1)
    scores = q.abs() @ k.abs().transpose(2, 3) * scale
    apart = (v[:, :, None] - out[:, :, :, None]).abs()
    return weights @ v.abs() + torch.einsum("bhts,bhts,bhtsd->bhtd", weights, scores, apart)


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


@pytest.mark.sampled(5)
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
    obeys_the_rule(got, plain, exact, terms(*(x.double() for x in (q, *wide)), mask[:, None], exact))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("scale", "cap"), [(0.5, None), (None, 0.7), (0.9, 1.5)])
@pytest.mark.parametrize(("heads", "kv", "queries", "window"), [
    (4, 4, 1, None), (6, 2, 9, None), (6, 2, 9, 4), (2, 1, 1, 5)])
def test_scores_are_scaled_and_capped(monkeypatch, dtype, scale, cap, heads, kv, queries, window):
    monkeypatch.setattr(module, "CHUNK", 5)
    q, k, v = make(2, heads, kv, queries, 19, 16, dtype)
    key_positions = torch.arange(19).expand(2, 19)
    positions = key_positions[:, 19 - queries:]
    exact = slow(q, k, v, positions, key_positions, window, scale, cap)
    got = attention(q, k, v, Visibility(positions, key_positions, window), scale, cap)
    assert (got.double() - exact).norm() <= (2e-6 if dtype == torch.float32 else 8e-3) * exact.norm()
    weights = attention_weights(q[0], k[0], key_positions[:1].expand(kv, 19), 19, scale, cap)
    if window is None:
        mixed = (weights.double() @ v[0, :, None].double()).flatten(0, 1)
        assert (mixed - exact[0]).norm() <= 1e-5 * exact[0].norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize(("heads", "kv", "queries", "window"), [
    (4, 4, 1, None), (6, 2, 9, None), (6, 2, 9, 4), (2, 1, 1, 5)])
def test_sinks_take_their_share(monkeypatch, dtype, cap, heads, kv, queries, window):
    monkeypatch.setattr(module, "CHUNK", 5)
    q, k, v = make(2, heads, kv, queries, 19, 16, dtype)
    sinks = torch.randn(heads, generator=torch.Generator().manual_seed(1)) * 3 + 1
    key_positions = torch.arange(19).expand(2, 19)
    positions = key_positions[:, 19 - queries:]
    exact = slow(q, k, v, positions, key_positions, window, None, cap, sinks)
    seen = Visibility(positions, key_positions, window)
    got = attention(q, k, v, seen, None, cap, sinks)
    bound = (2e-6 if dtype == torch.float32 else 8e-3) * exact.norm()
    assert (got.double() - exact).norm() <= bound
    assert torch.equal(got, attention(q, k, v, seen, None, cap, sinks.expand(2, -1)))
    weights = attention_weights(q[0], k[0], key_positions[:1].expand(kv, 19), 19, None, cap, window, sinks)
    mixed = (weights.double() @ v[0, :, None].double()).flatten(0, 1)
    assert (mixed - exact[0]).norm() <= 1e-5 * exact[0].norm()
    assert (weights.sum(-1) < 1).all()
    apart = slow(q, k, v, positions, key_positions, window, None, cap)
    assert (apart - exact).norm() > 20 * bound


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


def masked(q, keys, values, positions, key_positions, sees):
    """Float64 attention with a rule ``sees(query position, key position)``."""
    table = [[[kp >= 0 and kp <= p and sees(p, kp) for kp in keys_] for p in at]
             for keys_, at in zip(key_positions.tolist(), positions.tolist())]
    wide = [x.repeat_interleave(q.shape[1] // x.shape[1], 1).double() for x in (keys, values)]
    scores = q.double() @ wide[0].mT * q.shape[3] ** -0.5
    return scores.masked_fill(~torch.tensor(table)[:, None], -torch.inf).softmax(-1) @ wide[1]


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(("limit", "sinks"), [(1, 0), (1, 3), (5, 2), (100, 4), (6, 100)])
@pytest.mark.parametrize("queries", [1, 12])
def test_a_caches_window_and_its_sinks(monkeypatch, window, limit, sinks, queries):
    """Within the model's own window, a query sees the first positions and the last."""
    monkeypatch.setattr(module, "CHUNK", 5)
    q, k, v = make(2, 4, 2, queries, 40, 16)
    mixed = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    key_positions = torch.stack([torch.arange(40), mixed])
    positions = torch.arange(40 - queries, 40).expand(2, -1)
    got = attention(q, k, v, Visibility(positions, key_positions, window, limit, sinks))
    want = masked(q, k, v, positions, key_positions,
                  lambda p, kp: (kp > p - limit or kp < sinks) and (window is None or kp > p - window))
    assert torch.allclose(got.double(), want, atol=1e-5)


def test_between_sinks_and_window_nothing_is_masked_in_vain():
    """A range of keys is read even if its middle is masked; one without a gap has no mask at all."""
    seen = Visibility(torch.tensor([[99]]), torch.arange(100)[None], None, 10, 2)
    low, high, bias = seen.chunk(0, torch.float32)
    assert (low, high) == (0, 100) and int((bias == 0).sum()) == 12
    seen = Visibility(torch.tensor([[99]]), torch.tensor([[0, 1, *range(90, 100)]]), None, 10, 2)
    assert seen.chunk(0, torch.float32) == (0, 12, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("queries", [1, 5, 20])
def test_attention_weights_of_the_last_queries(dtype, heads, kv, queries):
    """Each key head holds its own positions, some slots are empty, a query sees what was before it."""
    q, k, _ = make(1, heads, kv, queries, 30, 16, dtype)
    random = torch.Generator().manual_seed(1)
    positions = torch.stack([torch.randperm(50, generator=random)[:30].sort().values for _ in range(kv)])
    positions[:, 0] = 0  # so that every query sees one at least
    positions[0, -3:] = -1
    got = attention_weights(q[0], k[0], positions.int(), 50)
    assert got.shape == (kv, heads // kv, queries, 30) and got.dtype == torch.float32
    for head in range(heads):
        own = head // (heads // kv)
        for i in range(queries):
            sees = (positions[own] >= 0) & (positions[own] <= 50 - queries + i)
            scores = k[0, own].double() @ q[0, head, i].double() * 16**-0.5
            want = scores.masked_fill(~sees, -torch.inf).softmax(-1)
            assert torch.allclose(got[own, head % (heads // kv), i].double(), want, atol=1e-5)


def test_attention_weights_are_those_that_attention_uses():
    q, k, v = make(1, 4, 2, 6, 25, 8)
    positions = torch.arange(25)
    weights = attention_weights(q[0], k[0], positions.expand(2, -1), 25)
    want = attention(q, k, v, Visibility(positions[None, -6:], positions[None]))
    assert torch.allclose((weights @ v[0][:, None]).flatten(0, 1), want[0], atol=1e-5)
