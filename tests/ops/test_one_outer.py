"""NVFP4's number of the tensor, made one for fused weights without changing them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from quantkit.formats.fp4 import MXFP4, NVFP4
from quantkit.ops.packing import with_one_outer
from quantkit.testing.formats import random_codes
from tests.helpers.quantized import quant_spec

NV = quant_spec("fp", 4, "group", 16, scale_dtype="e4m3")


def weight_with(power: int, lowest: float = 0.0):
    """A weight with scales of 0.005 to 0.015 that are multiples of 2^power; one of them is ``lowest``."""
    codes = random_codes(NV, (4, 64), seed=power + 100)
    scale = (codes.scale / 2.0**power).clamp(max=448).to(torch.float8_e4m3fn).float() * 2.0**power
    if lowest:
        scale[1, 2] = lowest
    return NVFP4.pack(dataclasses.replace(codes, scale=scale, outer=torch.full((1, 1), 2.0**power)),
                      torch.bfloat16)


def test_the_largest_number_becomes_that_of_all() -> None:
    weights = [weight_with(-15), weight_with(-12), weight_with(-13)]
    moved = with_one_outer(weights)
    assert {float(weight.tensors["weight_global_scale"]) for weight in moved} == {2.0**12}
    for before, after in zip(weights, moved, strict=True):
        assert torch.equal(NVFP4.dequantize(before), NVFP4.dequantize(after))
    assert moved[1] is weights[1]


def test_scales_that_would_lose_bits_stay_as_they_are() -> None:
    weights = [weight_with(-15, lowest=2.0**-24 * 1.875), weight_with(-3)]
    assert with_one_outer(weights) == weights


@pytest.mark.parametrize("count", [0, 1])
def test_there_is_nothing_to_do_for_one_weight(count: int) -> None:
    weights = [weight_with(-12)] * count
    assert with_one_outer(weights) == weights


def test_other_weights_have_no_such_number() -> None:
    packed = MXFP4.pack(random_codes(quant_spec("fp", 4, "group", 32, scale_dtype="e8m0"), (2, 64)),
                        torch.bfloat16)
    assert with_one_outer([packed, weight_with(-12)])[0] is packed
