"""Decode attention: against float64 over scattered pages, and a sequence alone or among others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quantkit_kernels import reference
from quantkit_kernels.triton.paged_attention import PIECE, paged_attention
from quantkit_kernels.triton.rope_kv import Pages


class Cache:
    """Random keys and values in shuffled pages; the slots behind a head's length are NaN."""

    def __init__(self, lengths, d, on, coded, seed=0):
        device, dtype = on
        random = torch.Generator().manual_seed(seed)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        need = -(-self.lengths // 64)
        count = int(need.sum()) + 2
        order = torch.randperm(count, generator=random)
        self.table = torch.full((*self.lengths.shape, int(need.max()) + 1), 0, dtype=torch.int32)
        k, v = (torch.randn(count, 64, d, generator=random) for _ in range(2))
        ks = vs = None
        if coded:
            (k, ks), (v, vs) = reference.encode_int8(k), reference.encode_int8(v)
            spoiled = (ks, vs)
        else:
            k, v = k.to(dtype), v.to(dtype)
            spoiled = (k, v)
        kept = torch.zeros(count, 64, dtype=torch.bool)
        at = torch.zeros(count, 64, dtype=torch.int32)
        for b, row in enumerate(need.tolist()):
            for h, pages in enumerate(row):
                self.table[b, h, :pages], order = order[:pages], order[pages:]
                slots = torch.arange(int(self.lengths[b, h]))
                kept[self.table[b, h, slots // 64], slots % 64] = True
                at[self.table[b, h, slots // 64], slots % 64] = slots.int() * 2  # every other one was dropped
        for part in spoiled:
            part[~kept] = float("nan")
        parts = [None if part is None else part.to(device) for part in (k, v, ks, vs)]
        self.pages = Pages(*parts, at.to(device))
        self.held = (k, v, ks, vs)

    def read(self, b, h):
        """Keys and values in float64, and positions, of one head."""
        slots = torch.arange(int(self.lengths[b, h]))
        where = (self.table[b, h, slots // 64].long(), slots % 64)
        k, v, ks, vs = self.held
        k, v = k[where].double(), v[where].double()
        if ks is not None:
            k, v = k * ks[where].double()[:, None], v * vs[where].double()[:, None]
        return k, v, self.pages.positions.cpu()[where]

    def attend(self, q, **how):
        device = q.device
        return paged_attention(q, self.pages, self.table.to(device), self.lengths.to(device), **how)

    def expected(self, q, window=None, sinks=0, now=None):
        """The same by torch in q's precision, and exactly."""
        group = q.shape[1] // self.lengths.shape[1]
        plain, exact = torch.zeros_like(q), torch.zeros(q.shape, dtype=torch.float64)
        for b in range(q.shape[0]):
            for h in range(self.lengths.shape[1]):
                k, v, at = self.read(b, h)
                seen = torch.ones(len(at), dtype=torch.bool)
                if window is not None:
                    seen = (at < sinks) | (at > now[b] - window)
                rows = slice(h * group, (h + 1) * group)
                exact[b, rows] = reference.attention(q[b, rows].cpu().double(), k, v, seen)
                there = (x.to(q.dtype).to(q.device) for x in (k, v))
                plain[b, rows] = reference.attention(q[b, rows], *there, seen.to(q.device))
        return plain, exact.to(q.device)


LENGTHS = [[1, 64], [65, 130], [0, 7], [PIECE * 64 + 1, 5]]


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize(("group", "d"), [(1, 64), (4, 128), (3, 96), (16, 32), (7, 20)])
def test_against_float64(on, randn, obeys_the_rule, coded, group, d):
    cache = Cache(LENGTHS if d == 64 else LENGTHS[1:3], d, on, coded)
    q = randn(cache.lengths.shape[0], 2 * group, d, seed=5, on=on)
    got = cache.attend(q)
    obeys_the_rule(got, *cache.expected(q))
    assert (got[[b for b, row in enumerate(cache.lengths.tolist()) if row[0] == 0], :group] == 0).all()


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize(("window", "sinks"), [(20, 4), (1, 0), (10**6, 0), (3, 200)])
def test_a_window_and_sinks(on, randn, obeys_the_rule, coded, window, sinks):
    cache = Cache([[65, 130], [3, 90]], 64, on, coded)
    now = torch.tensor([258, 178], dtype=torch.int32)
    q = randn(2, 8, 64, seed=5, on=on)
    got = cache.attend(q, window=window, sinks=sinks, query_positions=now.to(on[0]))
    obeys_the_rule(got, *cache.expected(q, window, sinks, now))


@pytest.mark.parametrize("coded", [False, True])
def test_large_and_small_numbers(on, randn, obeys_the_rule, coded):
    """Scores that overflow without the maximum taken out; weights that vanish in float16 times a scale."""
    # a nearly equal pair of large scores decides each head's error: many heads, or it is luck
    cache = Cache([[100, 70]] * 4, 64, on, coded)
    q = randn(4, 32, 64, seed=5, on=on) * 30
    if coded:
        for part in (cache.pages.v_scale, cache.held[3]):
            part.mul_(2.0**-12)
    obeys_the_rule(cache.attend(q), *cache.expected(q))


@pytest.mark.parametrize("coded", [False, True])
def test_a_sequence_does_not_depend_on_the_others(on, randn, coded):
    cache = Cache([[130, 64], [PIECE * 64 + 70, 600], [5, 9]], 64, on, coded)
    q = randn(3, 8, 64, seed=5, on=on)
    whole = cache.attend(q)
    for b in range(3):
        need = -(-int(cache.lengths[b].max()) // 64)
        alone = paged_attention(q[b:b + 1], cache.pages, cache.table[b:b + 1, :, :need].to(on[0]),
                                cache.lengths[b:b + 1].to(on[0]))
        assert torch.equal(alone[0], whole[b])
    perm = torch.tensor([2, 0, 1])
    turned = paged_attention(q[perm], cache.pages, cache.table[perm].to(on[0]), cache.lengths[perm].to(on[0]))
    assert torch.equal(turned, whole[perm])


def test_without_positions_a_slot_is_its_position(on, randn, obeys_the_rule):
    cache = Cache([[90, 90]], 32, on, False)
    cache.pages.positions.copy_(cache.pages.positions // 2)
    q, now = randn(1, 4, 32, seed=5, on=on), torch.tensor([89], dtype=torch.int32)
    got = paged_attention(q, replace(cache.pages, positions=None), cache.table.to(on[0]),
                          cache.lengths.to(on[0]), window=30, sinks=2, query_positions=now.to(on[0]))
    obeys_the_rule(got, *cache.expected(q, 30, 2, now))


def test_what_it_refuses(randn):
    on = (torch.device("cpu"), torch.float32)
    cache, q = Cache([[3, 3]], 32, on, False), randn(1, 4, 32, on=on)
    if not torch.cuda.is_available():  # compiled kernels take no CPU tensors
        assert cache.attend(q, scale=0.0).shape == q.shape
    wide = cache.table.long()
    for given in ((q[:, :3], cache.table, cache.lengths), (q, wide, cache.lengths),
                  (q, cache.table, cache.lengths[0]), (q.half(), cache.table, cache.lengths),
                  (q.repeat(1, 16, 1), cache.table, cache.lengths)):
        with pytest.raises(ValueError, match="fit together"):
            paged_attention(given[0], cache.pages, *given[1:])
    with pytest.raises(ValueError, match="positions"):
        cache.attend(q, window=3)
