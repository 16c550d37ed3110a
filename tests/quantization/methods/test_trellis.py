"""Trellises by rtn and gptq: closer than grids of as many bits, and never worse than rounding."""

from __future__ import annotations

import pytest
import torch

from quantkit.formats import pack_quantized, trellis
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.quantization.methods.base import LayerStats
from quantkit.quantization.methods.gptq import METHOD as GPTQ
from quantkit.quantization.methods.gptq import GptqOptions
from quantkit.quantization.methods.rounding import RTN, RtnOptions
from tests.helpers.quantized import trellis_spec

CHANNEL = Granularity(strategy="channel")


def weight_of(rows=128, cols=96, seed=0):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(rows, cols, generator=random) * (torch.rand(rows, 1, generator=random) + 0.5)


def stats_of(cols=96, seed=1):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(500, cols, generator=random) @ torch.randn(cols, cols, generator=random)
    return LayerStats(500, x.T @ x / 500)


def meaning(codes):
    layout = trellis.FORMAT if codes.spec.kind == "trellis" else pack_quantized.FORMAT
    return layout.dequantize(layout.pack(codes, torch.bfloat16))


def loss(weight, codes, stats):
    error = (meaning(codes) - weight).double()
    return ((error @ stats.hessian.double()) * error).sum(1)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("window", [8, 10])
def test_closer_than_a_grid(bits, window):
    weight, stats = weight_of(), stats_of()
    grid = QuantSpec(bits=bits, granularity=CHANNEL, scale_dtype="bfloat16")
    rounded, gridded = (RTN.run(weight, None, spec, RtnOptions(clip_search=True))
                        for spec in (trellis_spec(bits, window), grid))
    assert (meaning(rounded) - weight).square().sum() < 0.7 * (meaning(gridded) - weight).square().sum()
    solved, of_grid = (GPTQ.run(weight, stats, spec, GptqOptions())
                       for spec in (trellis_spec(bits, window), grid))
    assert loss(weight, solved, stats).sum() < 0.7 * loss(weight, of_grid, stats).sum()


def test_each_addition_lowers_the_loss():
    weight, stats = weight_of(), stats_of()
    rounded = loss(weight, RTN.run(weight, None, trellis_spec(3, 10), RtnOptions()), stats).sum()
    found = [loss(weight, GPTQ.run(weight, stats, trellis_spec(3, 10), GptqOptions(descent_passes=n)),
                  stats).sum()
             for n in range(3)]
    assert found[0] < 0.7 * rounded and found[1] < found[0] and found[2] < found[1]


@pytest.mark.parametrize("seed", range(4))
def test_no_tile_is_worse_than_rounded(seed):
    weight = weight_of(192, 40, seed)
    weight[64:128, 5] *= 30
    stats = stats_of(40, seed)
    solved = loss(weight, GPTQ.run(weight, stats, trellis_spec(2, 10), GptqOptions()), stats)
    rounded = loss(weight, RTN.run(weight, None, trellis_spec(2, 10), RtnOptions()), stats)
    assert (solved.view(-1, 64).sum(1) <= rounded.view(-1, 64).sum(1) * (1 + 1e-5)).all()


def test_rows_of_zeros_stay_finite():
    weight = weight_of(64, 32)
    weight[::2] = 0
    stats = stats_of(32)
    for codes in (RTN.run(weight, None, trellis_spec(3, 10), RtnOptions()),
                  GPTQ.run(weight, stats, trellis_spec(3, 10), GptqOptions())):
        found = meaning(codes)
        assert torch.isfinite(found).all() and found[::2].abs().max() < 1e-30
        nothing = ((weight @ stats.hessian) * weight).sum()
        assert loss(weight, codes, stats).sum() < 0.1 * nothing
