"""int8: at most half a scale of error, whatever comes in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.kv.codecs.eight_bit import Int8Vectors, rounded_up

CODEC = Int8Vectors()


def check(x):
    parts = CODEC.encode(x)
    layout = CODEC.layout(x.shape[-1], x.dtype)
    assert parts.keys() == layout.keys()
    for name, (shape, dtype) in layout.items():
        assert parts[name].shape == (*x.shape[:-1], *shape) and parts[name].dtype == dtype, name
    back, wide = CODEC.decode(parts), x.double()
    assert back.shape == x.shape and torch.isfinite(back).all() and torch.isfinite(parts["scale"]).all()
    assert int(parts["codes"].min()) >= -127 if x.numel() else True
    scale = parts["scale"].double()[..., None]
    # beside half a step, float32's rounding of the product
    assert ((back.double() - wide).abs() <= scale / 2 * (1 + 1e-4)).all()
    # the scale is the smallest that reaches the largest number, in bfloat16's steps and not denormal
    most = wide.abs().amax(-1, keepdim=True)
    assert (scale <= torch.maximum(most / 127 * (1 + 2**-6), torch.tensor(2.0**-126))).all()
    return parts, back


def test_awkward_vectors(vectors):
    @settings(max_examples=250, deadline=None)
    @given(vectors(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    def holds(made, dtype):
        kind, x = made
        x = x.to(dtype).nan_to_num_()
        parts, back = check(x)
        if "zero" in kind:
            assert torch.equal(back, torch.zeros_like(back)) and not parts["codes"].any()
        if kind == "equal" and dtype == torch.bfloat16:
            assert torch.allclose(back, x.float(), rtol=2**-7)

    holds()


@pytest.mark.parametrize("largest", [torch.finfo(torch.float32).max, 1e38, 3e38])
def test_the_largest_float32_stays_finite(largest):
    check(torch.tensor([[largest, -largest, 1.0, 0.0]]))
    check(torch.linspace(0.5, 1, 999)[:, None] * largest)


def test_each_token_and_head_is_apart():
    x = torch.randn(3, 2, 5, 16, generator=torch.Generator().manual_seed(0))
    whole = CODEC.encode(x)
    for name, part in CODEC.encode(x[1, 1, 3]).items():
        assert torch.equal(part, whole[name][1, 1, 3])


def test_codes_already_on_the_grid_come_back():
    codes = torch.arange(-127, 128).float()
    parts = CODEC.encode(codes * 0.5)
    assert torch.equal(parts["codes"].float(), codes) and float(parts["scale"]) == 0.5
    assert torch.equal(CODEC.decode(parts), codes * 0.5)


@settings(max_examples=200, deadline=None)
@given(st.floats(0, 2.0**127, width=32))
def test_rounded_up_is_the_least_bfloat16_above(x):
    up = rounded_up(torch.tensor([x]))
    below = (up.view(torch.int16) - 1).view(torch.bfloat16)
    assert float(up) >= x
    assert float(below) < x or float(up) == 2.0**-126
