"""Activations rounded to 8 bits: level by level what torch's operators give."""

from __future__ import annotations

import pytest
import torch

from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.ops.tokens import quantize_tokens
from quantkit_kernels.triton.levels import LONGEST, quantize
from quantkit_kernels.triton.rms_norm import rms_norm, rms_norm_levels

SPECS = {kind: QuantSpec(kind=name, bits=8, granularity=Granularity(strategy="channel"), activations="token")
         for kind, name in ((torch.int8, "int"), (torch.float16, "fp"))}


@pytest.fixture
def same():
    """Checks levels and scales against the reference."""
    def check(found, x):
        levels, scale = quantize_tokens(x, SPECS[found.values.dtype])
        assert torch.equal(found.values.float(), levels) and torch.equal(found.scale, scale[:, 0])
        assert found.dtype == x.dtype

    return check


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize(("m", "n"), [(1, 1), (3, 7), (4, 576), (2, 4100)])
def test_as_torch_rounds(on, randn, same, kind, m, n):
    x = randn(m, n, on=on)
    same(quantize(x, kind), x)
    same(quantize(x * 1e-4, kind), x * 1e-4)


@pytest.mark.parametrize("kind", SPECS)
def test_ties_zeros_and_outliers(on, same, kind):
    x = torch.zeros(5, 600, dtype=on[1], device=on[0])
    x[1] = torch.arange(600, device=on[0]) / 2 - 150
    x[2, 3] = 30000
    x[3] = torch.arange(-300, 300, device=on[0]) * 2.0**-10
    x[3, 0] = 448
    x[4, :2] = x.new_tensor([127, 2.5])
    same(quantize(x, kind), x)


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("ruin", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_said_by_the_scale(on, randn, same, kind, ruin):
    x = randn(3, 100, on=on)
    x[1, 37] = ruin
    found = quantize(x, kind)
    assert found.scale[1].isnan() and torch.isfinite(found.values.float()).all()
    same(type(found)(found.values[::2], found.scale[::2], found.dtype), x[::2])


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("add", [False, True])
def test_behind_a_norm(on, randn, kind, add):
    x, weight = randn(3, 576, on=on), randn(576, seed=1, on=on)
    added = (randn(3, 576, seed=2, on=on), randn(576, seed=3, on=on)) if add else ()
    y, h = rms_norm(x, weight, 1e-6, *added)
    found, h_too = rms_norm_levels(x, weight, 1e-6, kind, *added)
    again = quantize(y, kind)
    assert torch.equal(found.values, again.values) and torch.equal(found.scale, again.scale)
    assert torch.equal(h_too, h) and found.dtype == x.dtype


def test_rows_further_apart(on, randn, same):
    x = randn(4, 200, on=on)
    same(quantize(x[:, 32:132], torch.int8), x[:, 32:132].contiguous())
    same(quantize(x.T, torch.int8), x.T.contiguous())
    assert quantize(x[:0], torch.int8).values.shape == (0, 200)


def test_quantize_refuses_wrong_shapes_and_dtypes():
    for x, kind in ((torch.zeros(2, 4), torch.uint8), (torch.zeros(4), torch.int8),
                    (torch.zeros(1, LONGEST + 1), torch.int8)):
        with pytest.raises(ValueError, match="levels are"):
            quantize(x, kind)
