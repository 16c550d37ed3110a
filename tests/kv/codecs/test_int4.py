"""int4: at most half a scale of error in each group of 32, whatever comes in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.errors import UsageError
from quantkit.kv.codecs.int4 import CODEC, LARGEST


def check(x):
    parts = CODEC.encode(x)
    layout = CODEC.layout(x.shape[-1], x.dtype)
    assert parts.keys() == layout.keys()
    for name, (shape, dtype) in layout.items():
        assert parts[name].shape == (*x.shape[:-1], *shape) and parts[name].dtype == dtype, name
    back = CODEC.decode(parts)
    assert back.shape == x.shape
    assert all(torch.isfinite(y).all() for y in (back, parts["scale"], parts["low"]))
    wide = x.double().clamp(-LARGEST, LARGEST).unflatten(-1, (-1, 32))
    scale, low = parts["scale"].double()[..., None], parts["low"].double()[..., None]
    assert (low <= wide.amin(-1, keepdim=True)).all() and (low + 15 * scale >= wide).all()
    error = (back.double().unflatten(-1, (-1, 32)) - wide).abs()
    # beside half a step, float32's rounding of the difference and of the sum
    assert (error <= scale / 2 * (1 + 1e-4) + wide.abs() * 2**-23).all()
    return parts, back


def test_awkward_vectors(vectors):
    @settings(max_examples=250, deadline=None)
    @given(vectors(32), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    def holds(made, dtype):
        kind, x = made
        x = x.to(dtype).nan_to_num_()
        _, back = check(x)
        if "zero" in kind:
            assert torch.equal(back, torch.zeros_like(back))
        if kind == "equal" and dtype == torch.bfloat16:
            assert torch.equal(back, x.float()), "a bfloat16 is a group's low itself"

    holds()


@pytest.mark.parametrize("largest", [torch.finfo(torch.float32).max, 1e38, 3e38])
def test_the_largest_float32_stays_finite(largest):
    check(torch.tensor([largest, -largest, 1.0, 0.0] * 8))
    check(torch.full((32,), -largest))


def test_low_and_high_halves_of_a_byte():
    x = torch.arange(32).remainder(16).float()
    parts = CODEC.encode(x)
    assert parts["codes"].tolist() == [2 * i | (2 * i + 1) << 4 for i in range(8)] * 2
    assert (float(parts["scale"]), float(parts["low"])) == (1.0, 0.0)
    assert torch.equal(CODEC.decode(parts), x)


def test_groups_tokens_and_heads_are_apart():
    x = torch.randn(3, 2, 5, 64, generator=torch.Generator().manual_seed(0))
    whole = CODEC.encode(x)
    for name, part in CODEC.encode(x[1, 1, 3]).items():
        assert torch.equal(part, whole[name][1, 1, 3])
    x[..., 32:] *= 1000
    for name, part in CODEC.encode(x).items():
        half = part.shape[-1] // 2
        assert torch.equal(part[..., :half], whole[name][..., :half])


@pytest.mark.parametrize("dim", [1, 16, 31, 33, 80])
def test_a_head_dimension_that_does_not_fit_is_refused(dim):
    with pytest.raises(UsageError, match="divisible by 32") as caught:
        CODEC.layout(dim, torch.bfloat16)
    assert str(dim) in caught.value.why and "int8" in caught.value.next
