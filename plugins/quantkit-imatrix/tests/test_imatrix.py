"""The imatrix method: a weighted error below plain rounding's at every width, whatever the weight."""

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from quantkit.formats.level_values import dequantize
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.quantization.methods.base import LayerStats
from quantkit.quantization.methods.grid import SHRINKS, find_grid, round_to_grid, to_codes
from quantkit.quantization.methods.rounding import RTN, RtnOptions
from quantkit.support.errors import CalibrationError, SpecError
from quantkit.testing import check_method
from quantkit_imatrix.method import METHOD, ImatrixOptions

SOURCE = Path(__file__).parents[1] / "src"
OPTIONS = ImatrixOptions()


def spec_of(bits: int = 4, strategy: str = "group", symmetric: bool = True) -> QuantSpec:
    size = 16 if strategy == "group" else None
    return QuantSpec(bits=bits, symmetric=symmetric, scale_dtype="bfloat16",
                     granularity=Granularity(strategy=strategy, size=size))


def weight_of(rows: int = 24, cols: int = 64) -> torch.Tensor:
    """Heavy tails, as real weights have."""
    normal = torch.randn(rows, cols, generator=torch.Generator().manual_seed(4))
    return normal * normal.abs() * 0.02


def stats_of(cols: int = 64) -> LayerStats:
    """Inputs of very different sizes."""
    x = torch.randn(512, cols, generator=torch.Generator().manual_seed(5))
    x *= torch.logspace(-1, 1, cols)[torch.randperm(cols, generator=torch.Generator().manual_seed(6))]
    return LayerStats(512, x.T @ x / 512)


def weighted_error(values: torch.Tensor, weight: torch.Tensor, stats: LayerStats) -> float:
    assert stats.hessian is not None
    return float((values - weight).double().square().mul(stats.hessian.diagonal().double()).sum())


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("strategy", ["tensor", "channel", "group"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_weighted_error_is_below_that_of_rounding(bits: int, strategy: str, symmetric: bool) -> None:
    weight, stats, spec = weight_of(), stats_of(), spec_of(bits, strategy, symmetric)
    codes = METHOD.run(weight, stats, spec, OPTIONS)
    rounded = RTN.run(weight, None, spec, RtnOptions())
    assert (codes.zero is None) == symmetric
    error, baseline = (weighted_error(dequantize(c), weight, stats) for c in (codes, rounded))
    # at 8 bits one grid for all leaves nothing to gain
    assert error <= baseline * (0.9 if strategy == "group" else 1 if bits == 8 else 0.999)


@pytest.mark.parametrize("symmetric", [True, False])
def test_refitting_beats_a_search_of_ranges_alone(symmetric: bool) -> None:
    weight, stats, spec = weight_of(64), stats_of(), spec_of(3, "group", symmetric)
    assert stats.hessian is not None
    grid = find_grid(weight, spec, importance=stats.hessian.diagonal(), shrinks=SHRINKS)
    searched = dequantize(to_codes(round_to_grid(weight, grid, spec), grid, spec))
    error = weighted_error(dequantize(METHOD.run(weight, stats, spec, OPTIONS)), weight, stats)
    assert error < 0.97 * weighted_error(searched, weight, stats)


def test_in_each_group_the_error_is_never_above_that_of_rounding() -> None:
    weight, stats, spec = weight_of(), stats_of(), spec_of(2)
    assert stats.hessian is not None
    costs = stats.hessian.diagonal()

    def errors(codes) -> torch.Tensor:
        return (dequantize(codes) - weight).square().mul(costs).reshape(-1, 16).sum(1)

    assert bool((errors(METHOD.run(weight, stats, spec, OPTIONS))
                 <= errors(RTN.run(weight, None, spec, RtnOptions())) * 1.00001).all())


def test_columns_that_matter_come_closer() -> None:
    weight, spec = weight_of(128), spec_of(3)
    costs = torch.ones(64)
    costs[::4] = 1000.0
    flat, steep = (dequantize(METHOD.run(weight, LayerStats(1, torch.diag(c)), spec, OPTIONS)) - weight
                   for c in (torch.ones(64), costs))
    assert float(steep[:, ::4].square().sum()) < 0.7 * float(flat[:, ::4].square().sum())


@pytest.mark.parametrize("weight", [
    torch.zeros(2, 16), torch.full((2, 16), 0.3), torch.full((2, 16), -0.3), torch.full((2, 16), 1e-41),
    torch.full((2, 16), 65504.0), torch.full((2, 16), 3e38), torch.tensor([[0.0] * 15 + [900.0]] * 2)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_awkward_weights(weight: torch.Tensor, symmetric: bool) -> None:
    codes = METHOD.run(weight, stats_of(16), spec_of(4, "group", symmetric), OPTIONS)
    assert bool((codes.scale > 0).all())
    assert torch.equal(codes.scale, codes.scale.to(torch.bfloat16).float()), "rounded as stored"
    values = dequantize(codes)
    assert bool(torch.isfinite(values).all()) and bool((values[weight == 0] == 0).all())


def test_an_expert_without_tokens_is_rounded_with_a_note() -> None:
    weight = weight_of()
    codes = METHOD.run(weight, LayerStats(0, torch.zeros(64, 64)), spec_of(), OPTIONS)
    flat = METHOD.run(weight, LayerStats(1, torch.eye(64)), spec_of(), OPTIONS)
    assert torch.equal(codes.codes, flat.codes) and not flat.notes
    assert "no calibration input" in codes.notes[0]


def test_inputs_that_are_always_zero_leave_their_group_as_rounding_has_it() -> None:
    hessian = torch.eye(64)
    hessian[:16] = 0
    codes = METHOD.run(weight_of(), LayerStats(9, hessian), spec_of(), OPTIONS)
    rounded = RTN.run(weight_of(), None, spec_of(), RtnOptions())
    assert torch.equal(codes.codes[:, :16], rounded.codes[:, :16])


def test_contract() -> None:
    check_method(METHOD)


def test_refusals() -> None:
    with pytest.raises(SpecError, match="NaN or infinite"):
        METHOD.run(weight_of() * float("nan"), stats_of(), spec_of(), OPTIONS)
    with pytest.raises(CalibrationError, match="imatrix was given no Hessian"):
        METHOD.run(weight_of(), None, spec_of(), OPTIONS)
    with pytest.raises(CalibrationError, match="NaN or infinity"):
        METHOD.run(weight_of(), LayerStats(1, torch.full((64, 64), torch.inf)), spec_of(), OPTIONS)
    nf = QuantSpec(kind="nf", bits=4, granularity=Granularity(strategy="block", size=64))
    assert METHOD.reason_against(nf) is not None
    for wrong in ({"narrowest": 0}, {"narrowest": 1.2}, {"starts": 1}, {"refits": -1}, {"start": 4}):
        with pytest.raises(ValidationError):
            ImatrixOptions(**wrong)
    ImatrixOptions(**METHOD.quick)
