"""Rotation and storing: the same codes as torch's, in the right slots and nowhere else."""

from __future__ import annotations

import pytest
import torch

from quantkit_kernels import reference
from quantkit_kernels.triton.rope_kv import Pages, rope_kv

H, HKV = 4, 2


def empty(d, dtype, device, coded, count=6, placed=True):
    """Pages that are recognisably unwritten."""
    if coded:
        k = torch.full((count, 64, d), 99, dtype=torch.int8, device=device)
        scale = torch.full((count, 64), 77.0, dtype=torch.bfloat16, device=device)
    else:
        k, scale = torch.full((count, 64, d), 99.0, dtype=dtype, device=device), None
    at = torch.full((count, 64), -7, dtype=torch.int32, device=device) if placed else None
    return Pages(k, k.clone(), scale, None if scale is None else scale.clone(), at)


def angles(rows, d, device):
    turn = torch.rand(rows, d // 2, generator=torch.Generator().manual_seed(9)) * 6.3
    return turn.cos().repeat(1, 2).to(device), turn.sin().repeat(1, 2).to(device)


def slots_for(n, device, skipped=()):
    """Every token's slot in the first pages for head 0, in the last ones for head 1; some skipped."""
    slots = torch.stack((torch.arange(n) * 2, 383 - torch.arange(n)), 1)
    for token, head in skipped:
        slots[token, head] = -1
    return slots.to(device)


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize(("n", "d"), [(1, 64), (3, 128), (17, 64), (40, 96), (5, 20)])
def test_against_torch(on, randn, coded, n, d):
    device, dtype = on
    q, k, v = (randn(n, heads, d, seed=seed, on=on) for seed, heads in enumerate((H, HKV, HKV)))
    cos, sin = angles(n, d, device)
    pages, slots = empty(d, dtype, device, coded), slots_for(n, device)
    positions = torch.arange(n, device=device) + 1000
    out = rope_kv(q, k, v, cos, sin, pages, slots, positions)
    assert out.dtype == dtype and out.is_contiguous()
    turned = {name: reference.rotate(x.float(), cos, sin).to(dtype) for name, x in (("q", q), ("k", k))}
    assert torch.equal(out, turned["q"])
    for stored, scale, x in ((pages.k, pages.k_scale, turned["k"]), (pages.v, pages.v_scale, v)):
        found = stored.view(-1, d)[slots]
        if coded:
            codes, scales = reference.encode_int8(x.float())
            assert torch.equal(scale.view(-1)[slots], scales) and torch.equal(found, codes)
        else:
            assert torch.equal(found, x)
        rest = torch.ones(384, dtype=torch.bool, device=device).index_fill(0, slots.reshape(-1), False)
        assert (stored.view(-1, d)[rest] == 99).all()
    assert torch.equal(pages.positions.view(-1)[slots], positions.int()[:, None].expand(-1, 2))
    assert (pages.positions == -7).sum() == 384 - 2 * n


@pytest.mark.parametrize("coded", [False, True])
def test_skipped_slots_keep_what_they_had(on, randn, coded):
    n, d = 20, 64
    pages = empty(d, on[1], on[0], coded)
    slots = slots_for(n, on[0], skipped=[(0, 0), (7, 1), (19, 0), (19, 1)]).int()
    x = randn(n, HKV, d, on=on)
    rope_kv(randn(n, H, d, on=on), x, x, *angles(n, d, on[0]), pages, slots, torch.arange(n, device=on[0]))
    assert (pages.positions == -7).sum() == 384 - (2 * n - 4)
    assert (pages.v == 99).all(-1).sum() == 384 - (2 * n - 4)


def test_rows_of_a_table_and_tokens_that_lie_apart(on, randn):
    """Views into a fused projection, and angles looked up by position."""
    n, d = 18, 32
    fused = randn(n, (H + 2 * HKV) * d, on=on)
    q, k, v = (part.unflatten(1, (-1, d)) for part in fused.split((H * d, HKV * d, HKV * d), 1))
    cos, sin = angles(50, d, on[0])
    rows = torch.randint(0, 50, (n,), generator=torch.Generator().manual_seed(1)).to(on[0])
    a, b = (empty(d, on[1], on[0], False, placed=False) for _ in range(2))
    slots = slots_for(n, on[0])
    one = rope_kv(q, k, v, cos, sin, a, slots, rows=rows)
    two = rope_kv(q.contiguous(), k.contiguous(), v.contiguous(), cos[rows], sin[rows], b, slots)
    assert torch.equal(one, two) and torch.equal(a.k, b.k) and torch.equal(a.v, b.v)


def test_extremes(on):
    """Zeros, one outlier, ties, the smallest and the largest numbers: codes within 127, all as in torch."""
    d, dtype = 16, on[1]
    top = torch.finfo(dtype).max
    lines = torch.zeros(8, d)
    lines[1, 3] = -top
    lines[2] = torch.finfo(dtype).tiny
    lines[3] = torch.arange(d) + 0.5
    lines[3, 15] = 127
    lines[4], lines[5, ::2], lines[6] = 1.0, -1.0, top / 2
    lines[7] = torch.linspace(-1, 1, d)
    v = lines.to(dtype).to(on[0])[:, None].expand(-1, HKV, -1).contiguous()
    pages, slots = empty(d, dtype, on[0], True), slots_for(8, on[0])
    rope_kv(v.repeat(1, 2, 1), v, v, *angles(8, d, on[0]), pages, slots, torch.arange(8, device=on[0]))
    codes, scales = reference.encode_int8(v.float())
    assert torch.equal(pages.v.view(-1, d)[slots], codes)
    assert torch.equal(pages.v_scale.view(-1)[slots], scales)
    assert codes.abs().max() <= 127 and (codes[0] == 0).all() and scales.isfinite().all()


def test_what_it_refuses(randn):
    on = (torch.device("cpu"), torch.float32)
    x, (cos, sin) = randn(2, HKV, 32, on=on), angles(2, 32, "cpu")
    pages, slots, at = empty(32, torch.float32, "cpu", False), slots_for(2, "cpu"), torch.arange(2)
    assert rope_kv(x[:0], x[:0], x[:0], cos[:0], sin[:0], pages, slots[:0], at[:0]).shape == (0, HKV, 32)
    for change in ({"slots": slots[:1]}, {"cos": cos.double()}, {"v": x.half()}, {"positions": None},
                   {"cos": cos[:1], "sin": sin[:1]}):
        given = {"q": x, "k": x, "v": x, "cos": cos, "sin": sin, "pages": pages, "slots": slots,
                 "positions": at} | change
        with pytest.raises(ValueError, match=r"fit together|positions"):
            rope_kv(**given)
    with pytest.raises(ValueError, match="scales"):
        Pages(torch.zeros(1, 64, 8, dtype=torch.int8), torch.zeros(1, 64, 8, dtype=torch.int8))
