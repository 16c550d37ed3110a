"""What the e4m3 scales of activations are multiplied by, and NVFP4's number of the tensor."""

from __future__ import annotations

import pytest
import torch

from quantkit.quantization.methods.base import LayerStats
from quantkit.quantization.methods.gptq import METHOD as GPTQ
from quantkit.quantization.methods.gptq import GptqOptions
from quantkit.quantization.methods.rounding import RTN, RtnOptions
from quantkit.quantization.solve import with_input_factor
from quantkit.support.errors import CalibrationError
from quantkit.testing.formats import random_codes
from tests.helpers.quantized import quant_spec

NV = quant_spec("fp", 4, "group", 16, scale_dtype="e4m3")
NV_A4 = NV.model_copy(update={"activations": "group"})


@pytest.mark.parametrize(("largest", "factor"), [(2688.0, 1.0), (2689.0, 0.5), (1.0, 2048.0), (21.0, 128.0)])
def test_the_largest_power_of_2_that_keeps_inputs_in_range(largest: float, factor: float) -> None:
    stats = LayerStats(1, largest=torch.tensor([0.5, largest, 0.0]).abs().clamp(max=largest))
    codes = with_input_factor(random_codes(NV_A4, (2, 48)), stats)
    assert codes.input_factor is not None and codes.input_factor.tolist() == [[factor]]


@pytest.mark.parametrize("largest", [0.0, 1e-45])
def test_inputs_of_nothing(largest: float) -> None:
    codes = with_input_factor(random_codes(NV_A4, (2, 16)), LayerStats(0, largest=torch.full((16,), largest)))
    assert codes.input_factor is not None and codes.input_factor.tolist() == [[1.0]]


def test_it_must_be_measured_where_it_is_needed() -> None:
    codes = random_codes(NV, (2, 16))
    assert with_input_factor(codes, None) is codes
    with pytest.raises(CalibrationError, match="no sizes of its inputs"):
        with_input_factor(random_codes(NV_A4, (2, 16)), None)
    with pytest.raises(CalibrationError, match="no sizes of its inputs"):
        with_input_factor(random_codes(NV_A4, (2, 16)), LayerStats(3, torch.eye(16)))


@pytest.mark.parametrize("factor", [1.0, 3e-5, 1e6, 2.0**-80])
def test_scales_are_multiples_of_a_power_of_2(factor: float) -> None:
    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(0)) * factor
    stats = LayerStats(64, torch.eye(32))
    for codes in (RTN.run(weight, None, NV, RtnOptions()), GPTQ.run(weight, stats, NV, GptqOptions())):
        assert codes.outer is not None and torch.frexp(codes.outer).mantissa.item() == 0.5
        stored = codes.scale / codes.outer
        assert torch.equal(stored, stored.to(torch.float8_e4m3fn).float()) and stored.max() <= 448
        assert weight.abs().max() / 6 / 448 <= codes.outer.item() < weight.abs().max() / 6 / 224
