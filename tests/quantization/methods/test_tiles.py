"""fp8 in squares: scales by rounding and by search, and GPTQ, which is never worse than rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.formats.eight_bit import FLOAT as FORMAT
from quantkit.formats.spec import QuantSpec
from quantkit.quantization.methods.base import LayerStats
from quantkit.quantization.methods.gptq import METHOD as GPTQ
from quantkit.quantization.methods.gptq import GptqOptions
from quantkit.quantization.methods.rounding import RTN, RtnOptions
from tests.helpers.quantized import quant_spec


def spec_of(size: int) -> QuantSpec:
    return quant_spec("fp", 8, "tile", size)


def problem(rows: int, cols: int, seed: int) -> tuple[torch.Tensor, LayerStats]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * cols, cols, generator=random) @ torch.randn(cols, cols, generator=random)
    weight = torch.randn(rows, cols, generator=random) * torch.rand(rows, 1, generator=random)
    return weight, LayerStats(4 * cols, x.T @ x / (4 * cols))


def loss(codes, weight: torch.Tensor, stats: LayerStats) -> float:
    assert stats.hessian is not None
    error = (FORMAT.dequantize(FORMAT.pack(codes, torch.bfloat16)) - weight).double()
    return float(((error @ stats.hessian.double()) * error).sum())


@pytest.mark.parametrize(("rows", "cols"), [(64, 32), (40, 70), (5, 7)])
def test_rounding_against_numpy(rows: int, cols: int) -> None:
    weight, _ = problem(rows, cols, 0)
    codes = RTN.run(weight, None, spec_of(16), RtnOptions())
    assert codes.scale.view(torch.uint8).numel() == 4 * codes.scale.numel()  # it can be saved
    for down in range(-(-rows // 16)):
        for across in range(-(-cols // 16)):
            part = (slice(down * 16, down * 16 + 16), slice(across * 16, across * 16 + 16))
            largest = np.abs(weight[part].numpy()).max() / np.float32(448)
            scale = torch.tensor(largest).to(torch.bfloat16).float()
            assert codes.scale[down, across] == scale
            expected = (weight[part] / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            stored = codes.codes[part].contiguous().view(torch.float8_e4m3fn)
            assert torch.equal(stored.float(), expected.float())


def test_a_search_lowers_the_error() -> None:
    weight, _ = problem(40, 70, 1)
    errors = []
    for search in (False, True):
        codes = RTN.run(weight, None, spec_of(16), RtnOptions(clip_search=search))
        errors.append((FORMAT.dequantize(FORMAT.pack(codes, torch.bfloat16)) - weight).norm())
    assert errors[1] < errors[0]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(size=st.sampled_from([2, 16, 128]), rows=st.sampled_from([1, 5, 33, 140]),
       cols=st.sampled_from([3, 16, 50]), descent_passes=st.integers(0, 2), search=st.booleans(),
       seed=st.integers(0, 9999))
def test_gptq_is_never_worse_than_rounding(size: int, rows: int, cols: int, descent_passes: int, search: bool,
                                           seed: int) -> None:
    weight, stats = problem(rows, cols, seed)
    options = GptqOptions(descent_passes=descent_passes, clip_search=search)
    solved = GPTQ.run(weight, stats, spec_of(size), options)
    rounded = RTN.run(weight, None, spec_of(size), RtnOptions())
    assert loss(solved, weight, stats) <= loss(rounded, weight, stats) * (1 + 1e-5) + 1e-9


def test_gptq_halves_the_loss_of_a_real_shape_or_so() -> None:
    weight, stats = problem(96, 80, 3)
    solved = loss(GPTQ.run(weight, stats, spec_of(32), GptqOptions()), weight, stats)
    assert solved < 0.9 * loss(RTN.run(weight, None, spec_of(32), RtnOptions()), weight, stats)


def test_rows_are_solved_in_parts_that_cut_no_square(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, stats = problem(100, 24, 4)
    together = GPTQ.run(weight, stats, spec_of(16), GptqOptions())
    monkeypatch.setattr("quantkit.quantization.methods.gptq.WEIGHTS_AT_ONCE", 24 * 20)
    apart = GPTQ.run(weight, stats, spec_of(16), GptqOptions())
    assert torch.equal(together.scale, apart.scale)
    assert (together.codes != apart.codes).float().mean() < 0.01
