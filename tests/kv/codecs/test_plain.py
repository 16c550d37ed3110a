"""Floating point as it is, or rounded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.kv.codecs.plain import PlainVectors

NONE, BF16 = PlainVectors(None), PlainVectors(torch.bfloat16)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("codec", [NONE, BF16], ids=lambda c: c.name)
def test_awkward_vectors(vectors, codec):
    @settings(max_examples=100, deadline=None)
    @given(vectors(), st.sampled_from(DTYPES))
    def holds(made, dtype):
        x = made[1].to(dtype).nan_to_num_()
        parts = codec.encode(x)
        (name, (shape, stored)), = codec.layout(x.shape[-1], dtype).items()
        assert parts[name].shape == (*x.shape[:-1], *shape) and parts[name].dtype == stored
        back = codec.decode(parts)
        assert torch.isfinite(back).all()
        if codec is NONE or dtype == torch.bfloat16:
            assert back.dtype == dtype and torch.equal(back, x) and torch.equal(back.signbit(), x.signbit())
        else:
            assert ((back.double() - x.double()).abs() <= x.double().abs() * 2**-8 + 2.0**-133).all()

    holds()


def test_what_is_too_large_becomes_the_largest():
    most = torch.finfo(torch.float32).max
    got = BF16.decode(BF16.encode(torch.tensor([most, -most])))
    assert got.tolist() == [torch.finfo(torch.bfloat16).max, -torch.finfo(torch.bfloat16).max]
