"""Grids of 2 to 4 bits: at most half a step of error, by channel or by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.kv.codecs.eight_bit import LARGEST
from quantkit.kv.codecs.kivi import GroupedGrid

from .test_all import page


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("channels", [True, False])
def test_half_a_step_at_most(bits, channels, vectors):
    coding, top = GroupedGrid(bits, channels), 2**bits - 1

    @settings(max_examples=80, deadline=None)
    @given(vectors(32), st.sampled_from([torch.float32, torch.bfloat16]))
    def holds(made, dtype):
        x = page(made[1]).to(dtype).nan_to_num_()
        parts = coding.encode(x)
        at = -2 if channels else -1
        wide, back = (t.double().clamp(-LARGEST, LARGEST).unflatten(at, (-1, 32))
                      for t in (x, coding.decode(parts)))
        scale, low = (parts[name].double().unsqueeze(at) for name in ("scale", "low"))
        rounding = (wide.abs() + low.abs()) * 2**-23  # float32's, of the difference and of the sum
        assert (low <= wide).all() and (low + top * scale >= wide - rounding).all()
        assert ((back - wide).abs() <= scale / 2 * (1 + 1e-4) + rounding).all()

    holds()


@pytest.mark.parametrize("largest", [torch.finfo(torch.float32).max, 1e38, 3e38])
def test_the_largest_float32_stays_finite(largest):
    for coding in (GroupedGrid(4, True), GroupedGrid(2, False)):
        x = torch.tensor([largest, -largest, 1.0, 0.0] * 8).expand(64, 32)
        assert torch.isfinite(coding.decode(coding.encode(x))).all()
        assert torch.isfinite(coding.decode(coding.encode(-x.abs()))).all()


def test_a_large_channel_costs_keys_nothing_and_values_a_lot():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    x[:, 5] *= 100
    error = {by: (one.decode(one.encode(x)) - x)[:, 6:32].square().mean()
             for by, one in (("channel", GroupedGrid(4, True)), ("token", GroupedGrid(4, False)))}
    assert error["channel"] < 0.02 and error["token"] > 50 * error["channel"]
