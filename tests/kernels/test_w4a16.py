"""int4 weights in groups: against float64, over shapes that don't fit, and row by row."""

from __future__ import annotations

import pytest
import torch

from quantkit_kernels.reference import dequantize_int
from quantkit_kernels.triton.matmul import multiply
from quantkit_kernels.triton.w4a16 import pack


def weight(n, k, group, zeros=False, seed=0, scales=torch.float16):
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (n, k), generator=random, dtype=torch.uint8)
    scale = (0.01 * (0.5 + torch.rand(n, k // group, generator=random))).to(scales).float()
    zero = torch.randint(0, 16, scale.shape, generator=random, dtype=torch.uint8) if zeros else None
    return codes, scale, zero


@pytest.fixture
def check(product_obeys_the_rule):
    """Ours against torch in the same precision and the exact product; returns ours."""
    def run(x, codes, scale, zero, family=None):
        there = [None if part is None else part.to(x.device) for part in (codes, scale, zero)]
        got = multiply(x, pack(*there, family))
        exact = dequantize_int(codes, scale, 8 if zero is None else zero).to(x.device)
        product_obeys_the_rule(got, x, exact)
        return got

    return run


@pytest.mark.sampled(5)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("n", "k", "group", "m"), [
    *((*shape, m) for shape in ((1, 32, 32), (33, 96, 32), (3, 64, 64), (40, 128, 128), (17, 256, 256))
      for m in (1, 3, 16, 17)),
    (130, 160, 32, 1), (130, 160, 32, 17), (129, 192, 64, 16), (200, 640, 128, 3), (5, 100, 100, 17)])
def test_against_float64(on, randn, check, n, k, group, zeros, m):
    check(randn(m, k, on=on), *weight(n, k, group, zeros))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("m", "group"), [(33, 32), (65, 64), (130, 128), (200, 32)])
@pytest.mark.parametrize("zeros", [False, True])
def test_prefill(on, randn, check, m, group, zeros):
    check(randn(m, 256, on=on), *weight(140, 256, group, zeros))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", ["ampere", "hopper", "blackwell", "cdna"])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_every_order_of_columns(on, randn, check, family, group):
    if on[0].type == "cuda" and family != "hopper":
        family = None
    check(randn(5, 256, on=on), *weight(130, 256, group, True), family)


@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float16])
def test_scales_beside_zero_points(on, randn, check, scales):
    codes, scale, zero = weight(20, 128, 32, True, scales=scales)
    check(randn(2, 128, on=on), codes, scale, zero)


def test_every_code_and_every_zero_point_is_exact(on):
    codes = torch.arange(16, dtype=torch.uint8).repeat(16, 8)
    zero = torch.arange(16, dtype=torch.uint8)[:, None].repeat(1, 4)
    x = torch.eye(128, dtype=on[1], device=on[0])
    got = multiply(x, pack(codes.to(on[0]), torch.ones(16, 4, device=on[0]), zero.to(on[0])))
    assert torch.equal(got.cpu().float(), (codes.int() - zero[:, :1].int()).T.float())


def test_groups_without_a_scale_outliers_and_a_common_mean(on, randn, check):
    codes, scale, _ = weight(20, 256, 64)
    scale[:, 1] = 0
    scale[3] = 0
    x = randn(4, 256, on=on) + 3
    x[1, 7] = 1000
    assert (check(x, codes, scale, None)[:, 3] == 0).all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("zeros", [False, True])
def test_a_row_does_not_depend_on_the_others(on, randn, rows_stand_alone, zeros):
    codes, scale, zero = weight(150, 1088, 64, zeros)
    packed = pack(codes.to(on[0]), scale.to(on[0]), None if zero is None else zero.to(on[0]))
    rows_stand_alone(packed, randn(16, 1088, on=on))



def test_pack_refuses_wrong_groups_and_shapes():
    codes, scale, zero = weight(4, 96, 48)
    with pytest.raises(ValueError, match="multiple of 128"):
        pack(codes, scale)
    codes, scale, zero = weight(4, 64, 32, True)
    with pytest.raises(ValueError, match="exactly"):
        pack(codes, scale * 1.0001, zero)
    assert pack(codes, scale * 1.0001).mode == "symmetric"
