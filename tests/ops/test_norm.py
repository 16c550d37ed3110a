"""RMSNorm as transformers computes it, rounding included."""

from __future__ import annotations

import pytest
import torch

from quantkit.ops.rows import rms_norm


def formula(x, weight, eps):
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1,), (2, 7), (1, 1, 576), (3, 5, 2, 24)])
def test_equals_the_formula(obeys_the_rule, dtype, shape):
    random = torch.Generator().manual_seed(0)
    x = (5 * torch.randn(shape, generator=random)).to(dtype)
    weight = torch.randn(shape[-1], generator=random).to(dtype)
    wide = x.double()
    exact = weight.double() * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    got, plain = rms_norm(x, weight, 1e-5), formula(x, weight, 1e-5)
    obeys_the_rule(got, plain, exact)
    assert dtype == torch.float32 or torch.equal(got, plain)


def test_half_precision_sums_do_not_overflow():
    x = torch.full((1, 64), 300.0, dtype=torch.float16)  # squares are beyond float16
    assert torch.equal(rms_norm(x, torch.ones(64).half(), 1e-6), torch.ones(1, 64).half())


def test_zeros_stay_zeros():
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_float32_weight_multiplies_before_the_only_rounding(obeys_the_rule, dtype):
    random = torch.Generator().manual_seed(0)
    x, weight = (5 * torch.randn(4, 33, generator=random)).to(dtype), 1 + torch.randn(33, generator=random)
    wide = x.float()
    plain = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight).to(dtype)
    exact = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()
    got = rms_norm(x, weight, 1e-6)
    obeys_the_rule(got, plain, exact)
    assert not torch.equal(got, rms_norm(x, weight.to(dtype), 1e-6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weight", ["plain", "float32"])
def test_a_row_does_not_depend_on_the_others(dtype, weight):
    random = torch.Generator().manual_seed(0)
    x, scale = 5 * torch.randn(23, 51, generator=random).to(dtype), torch.randn(51, generator=random)
    scale = scale if weight == "float32" else scale.to(dtype)
    alone = torch.cat([rms_norm(row, scale, 1e-6) for row in x.split(1)])
    for count in (2, 5, 23):
        assert torch.equal(rms_norm(x[-count:], scale, 1e-6), alone[-count:])
    assert rms_norm(x[:0], scale, 1e-6).shape == (0, 51)


def test_gradients_pass():
    x = torch.randn(3, 8, requires_grad=True)
    rms_norm(x, torch.ones(8), 1e-6).sum().backward()
    assert x.grad is not None and torch.isfinite(x.grad).all()
