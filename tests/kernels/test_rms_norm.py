"""RMSNorm: against float64, with and without the residual."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from quantkit_kernels import reference
from quantkit_kernels.triton.rms_norm import rms_norm


@pytest.mark.sampled(4)
@pytest.mark.parametrize("n", [1, 7, 64, 576, 1024, 4100])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("add", [False, True])
def test_against_float64(on, randn, obeys_the_rule, n, rows, add):
    x, weight = randn(rows, n, on=on), randn(n, seed=1, on=on)
    residual = randn(rows, n, seed=2, on=on) if add else None
    got, h = rms_norm(x, weight, 1e-6, residual)
    assert torch.equal(h, x if residual is None else x + residual)
    obeys_the_rule(got, F.rms_norm(h, (n,), None, 1e-6) * weight, reference.rms_norm(h, weight, 1e-6))


@pytest.mark.parametrize("n", [7, 4100])
@pytest.mark.parametrize("floats", [False, True])
def test_a_norm_that_follows_a_norm_is_the_same_as_both_and_a_sum(on, randn, n, floats):
    kind = (on[0], torch.float32) if floats else on
    x, residual, before, weight = (randn(*size, seed=seed, on=place) for seed, (size, place) in enumerate(
        (((3, n), on), ((3, n), on), ((n,), kind), ((n,), kind))))
    h = residual + rms_norm(x, before, 1e-6)[0]
    got, total = rms_norm(x, weight, 1e-6, residual, before)
    assert torch.equal(total, h) and torch.equal(got, rms_norm(h, weight, 1e-6)[0])


def test_a_float32_weight_multiplies_before_it_is_rounded(on, randn):
    x, weight = randn(3, 576, on=on), randn(576, seed=1, on=(on[0], torch.float32))
    got, _ = rms_norm(x, weight, 1e-6)
    assert torch.allclose(got, F.rms_norm(x.float(), (576,), weight, 1e-6).to(x.dtype), rtol=2e-3, atol=1e-7)


def test_any_leading_shape_and_strides(on, randn):
    x, weight = randn(2, 32, 3, on=on).transpose(1, 2), randn(32, seed=1, on=on)
    got, _ = rms_norm(x, weight, 1e-5)
    assert got.shape == (2, 3, 32)
    assert torch.equal(got[1, 2], rms_norm(x[1, 2].clone(), weight, 1e-5)[0])
    assert rms_norm(x[:0], weight, 1e-5)[0].shape == (0, 3, 32)


def test_zeros_and_outliers(on, randn):
    weight = randn(128, seed=1, on=on)
    assert (rms_norm(torch.zeros(1, 128, dtype=on[1], device=on[0]), weight, 1e-6)[0] == 0).all()
    x = torch.zeros(1, 128, dtype=on[1], device=on[0])
    x[0, 5] = 30000  # its square is no float16
    got, _ = rms_norm(x, weight, 1e-6)
    assert torch.allclose(got[0, 5].float(), 128**0.5 * weight[5].float(), rtol=1e-2)


def test_rms_norm_refuses_wrong_shapes_and_dtypes():
    x = torch.zeros(2, 8)
    for weight, residual in ((torch.ones(7), None), (torch.ones(8), torch.zeros(3, 8))):
        with pytest.raises(ValueError, match="don't fit"):
            rms_norm(x, weight, 1e-6, residual)
    with pytest.raises(ValueError, match="before None don't"):
        rms_norm(x, torch.ones(7), 1e-6)
    with pytest.raises(ValueError, match="don't fit"):
        rms_norm(x, torch.ones(8), 1e-6, before=torch.ones(8))
