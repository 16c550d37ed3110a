"""How a multiply is cut: all of K once, by the weight's shape alone."""

from __future__ import annotations

import pytest
import torch

from quantkit_kernels.triton.matmul import PROGRAMS, SPLIT_ROWS, plan
from quantkit_kernels.triton.w8a16 import pack, w8a16

FAMILIES = ("ampere", "hopper", "blackwell", "cdna")


@pytest.mark.parametrize("n", [1, 128, 4096, 14336, 128256])
@pytest.mark.parametrize("tiles", [1, 2, 3, 5, 32, 33, 112])
def test_segments_cover_k_and_are_the_same_for_all_rows(n, tiles):
    for family in FAMILIES:
        plans = [plan(n, tiles, m, 64, family) for m in (1, 2, 16, 17, 64, SPLIT_ROWS, 4096)]
        assert len({(p.per, p.segments) for p in plans}) == 1
        p = plans[0]
        assert (p.segments - 1) * p.per < tiles <= p.segments * p.per
        assert p.segments * -(-n // 128) <= max(PROGRAMS, -(-n // 128))
        assert {q.split for q in plans[:-1]} == {p.segments > 1} and not plans[-1].split


@pytest.mark.parametrize("family", FAMILIES)
def test_a_program_covers_few_rows_without_waste(family):
    assert plan(4096, 32, 1, 128, family).bm == plan(4096, 32, 16, 128, family).bm == 16
    assert all(plan(4096, 32, m, bk, family).bm <= 128 for m in (17, 4096) for bk in (32, 64, 128))


def test_refuses_other_shapes_and_dtypes():
    weight = pack(torch.zeros(3, 8, dtype=torch.int8), torch.ones(3))
    for x in (torch.zeros(2, 9), torch.zeros(8), torch.zeros(2, 8, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"\[m, 8\]"):
            w8a16(x, weight)
    assert w8a16(torch.zeros(0, 8), weight).shape == (0, 3)
    assert weight.nbytes == 128 * 64 + 4 * 3
