"""int8 weights: against float64, over shapes that don't fit, and row by row."""

from __future__ import annotations

import pytest
import torch

from quantkit_kernels.reference import dequantize_int
from quantkit_kernels.triton.matmul import multiply
from quantkit_kernels.triton.w8a16 import pack


def weight(n, k, seed=0):
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (n, k), generator=random, dtype=torch.int8)
    return codes, 0.01 * (0.5 + torch.rand(n, generator=random))


@pytest.fixture
def check(product_obeys_the_rule):
    """Ours against torch in the same precision and the exact product; returns ours."""
    def run(x, codes, scale, family=None):
        got = multiply(x, pack(codes.to(x.device), scale.to(x.device), family))
        exact = dequantize_int(codes, scale[:, None]).to(x.device)
        product_obeys_the_rule(got, x, exact)
        return got

    return run


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("n", "k", "m"), [
    *((n, k, m) for n, k in ((1, 1), (3, 16), (33, 100), (128, 64)) for m in (1, 3, 16, 17)),
    (130, 576, 1), (130, 576, 17), (257, 1000, 3)])
def test_against_float64(on, randn, check, n, k, m):
    check(randn(m, k, on=on), *weight(n, k))


@pytest.mark.parametrize("m", [33, 130, 200])
def test_prefill(on, randn, check, m):
    check(randn(m, 192, on=on), *weight(140, 192))


@pytest.mark.parametrize("family", ["ampere", "hopper", "blackwell", "cdna"])
def test_every_order_of_columns(on, randn, check, family):
    if on[0].type == "cuda" and family != "hopper":
        family = None
    check(randn(5, 160, on=on), *weight(130, 160), family)


def test_every_code_is_exact(on):
    codes = torch.arange(-128, 128).to(torch.int8).reshape(4, 64)
    x = torch.eye(64, dtype=on[1], device=on[0])
    got = multiply(x, pack(codes.to(on[0]), torch.ones(4, device=on[0])))
    assert torch.equal(got.cpu().float(), codes.T.float())


def test_rows_without_a_scale_and_outliers(on, randn, check):
    codes, scale = weight(20, 128)
    scale[3] = 0
    x = randn(4, 128, on=on)
    x[1, 7] = 1000
    assert (check(x, codes, scale)[:, 3] == 0).all()


def test_a_row_does_not_depend_on_the_others(on, randn, rows_stand_alone):
    packed = pack(*(part.to(on[0]) for part in weight(150, 1088)))
    rows_stand_alone(packed, randn(16, 1088, on=on))
