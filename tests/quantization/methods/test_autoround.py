"""AutoRound: the gradients of its own formula as autograd finds them, and never worse than rounding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.formats.base import Codes
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.quantization.methods import autoround
from quantkit.quantization.methods.autoround import METHOD, AutoRoundOptions
from quantkit.quantization.methods.base import LayerStats
from quantkit.quantization.methods.rounding import RTN, RtnOptions
from quantkit.support.errors import CalibrationError
from tests.helpers.quantized import integer_spec


def problem(rows: int, cols: int, seed: int, tokens: int = 60) -> tuple[torch.Tensor, LayerStats]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, cols, generator=random) @ torch.randn(cols, cols, generator=random)
    return torch.randn(rows, cols, generator=random) * 0.05, LayerStats(tokens, x.T @ x / tokens)


def values(codes: Codes) -> torch.Tensor:
    zero = 2 ** (codes.spec.bits - 1) if codes.zero is None else codes.zero.float().unsqueeze(-1)
    groups = codes.codes.float().reshape(*codes.scale.shape, -1)
    return ((groups - zero) * codes.scale.unsqueeze(-1)).reshape(codes.codes.shape)


def losses(codes: Codes, weight: torch.Tensor, stats: LayerStats) -> torch.Tensor:
    assert stats.hessian is not None
    error = (values(codes) - weight).double()
    return ((error @ stats.hessian.double()) * error).sum(1)


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x + (x.round() - x).detach()


def by_autograd(weight: torch.Tensor, hessian: torch.Tensor, spec: QuantSpec, steps: int) -> torch.Tensor:
    """The paper's formula with straight-through rounding, in float32 too, since a group's
    largest weight is half way between two levels; every row's least loss."""
    shape, top = spec.scale_shape((weight.shape[0], weight.shape[1])), 2**spec.bits - 1
    groups = weight.reshape(*shape, -1)
    low, high = groups.amin(-1, True).clamp(max=0), groups.amax(-1, True).clamp(min=0)
    shift = torch.zeros_like(groups, requires_grad=True)
    ends = torch.ones(2, *low.shape, requires_grad=True)
    least = torch.full((weight.shape[0],), torch.inf)
    for step in range(steps + 1):
        if spec.symmetric:
            scale = torch.maximum(-low, high) * ends[0] / (top / 2)
            zero = torch.full_like(scale, 2 ** (spec.bits - 1))
            made = ((rounded(groups / scale + shift) + zero).clamp(0, top) - zero) * scale
        else:
            first, last = low * ends[0], high * ends[1]
            scale = (last - first) / top
            zero = (-first / scale).round()
            # a clipped weight is at an end of the range, and moves with it
            free = rounded(groups / scale + shift) + zero.detach()
            made = torch.where(free > top, last + ((top - zero) * scale - last).detach(),
                               torch.where(free < 0, first + (-zero * scale - first).detach(),
                                           (free - zero.detach()) * scale))
        error = made.reshape(weight.shape) - weight
        loss = ((error @ hessian) * error).sum(1)
        least = torch.minimum(least, loss.detach())
        slope_shift, slope_ends = torch.autograd.grad(loss.sum(), [shift, ends])
        move = (1 / steps) * (1 - step / steps)
        with torch.no_grad():
            shift -= move * slope_shift.sign()
            shift.clamp_(-0.5, 0.5)
            ends -= move * (slope_ends[:1] if spec.symmetric else slope_ends).sign()
            ends.clamp_(0.5, 1)
    return least


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", [None, 8])
def test_it_steps_as_autograd_does(bits: int, symmetric: bool, size: int | None) -> None:
    weight, stats = problem(64, 24, bits)
    assert stats.hessian is not None
    spec = integer_spec(bits, size, symmetric, "float32")
    codes = METHOD.run(weight, stats, spec, AutoRoundOptions(steps=12, descent_passes=0))
    expected = by_autograd(weight, stats.hessian, spec, 12)
    found = losses(codes, weight, stats)
    # where a gradient is 0 but for rounding, its sign is chance: that may happen to a row, not to many
    assert float(((found - expected).abs() < 1e-3 * expected).float().mean()) > 0.85
    assert abs(float(found.sum() / expected.sum()) - 1) < 0.04


@settings(max_examples=40, deadline=None, derandomize=True)
@given(bits=st.integers(2, 8), rows=st.sampled_from([1, 17]), groups=st.integers(1, 3),
       size=st.sampled_from([None, 2, 13]), symmetric=st.booleans(), clip=st.booleans(),
       descent_passes=st.integers(0, 1), tokens=st.sampled_from([1, 5, 200]), seed=st.integers(0, 9999))
def test_no_row_is_worse_than_rounded(bits: int, rows: int, groups: int, size: int | None, symmetric: bool,
                                      clip: bool, descent_passes: int, tokens: int, seed: int) -> None:
    weight, stats = problem(rows, groups * (size or 11), seed, tokens)
    spec = integer_spec(bits, size, symmetric, "float32")
    codes = METHOD.run(weight, stats, spec, AutoRoundOptions(steps=8, clip=clip,
                                                             descent_passes=descent_passes))
    plain = losses(RTN.run(weight, None, spec, RtnOptions()), weight, stats)
    assert bool((losses(codes, weight, stats) <= plain * (1 + 1e-4) + 1e-9).all())


def test_learning_helps_and_learning_the_ends_helps_more() -> None:
    weight, stats = problem(64, 64, 0, 400)
    spec = integer_spec(3, 32, True, "float32")
    plain = losses(RTN.run(weight, None, spec, RtnOptions()), weight, stats).sum()
    by = {name: float(losses(METHOD.run(weight, stats, spec, AutoRoundOptions(**options)), weight,
                             stats).sum() / plain)
          for name, options in {"rounding": {"clip": False, "descent_passes": 0},
                                "ends": {"descent_passes": 0}, "visited": {"descent_passes": 1}}.items()}
    assert by["rounding"] < 0.8 and by["ends"] < by["rounding"] and by["visited"] < by["ends"]


def test_without_inputs_it_rounds_and_says_so() -> None:
    weight, _ = problem(8, 16, 1)
    spec = integer_spec(4, 8, False, "float32")
    codes = METHOD.run(weight, LayerStats(0, torch.zeros(16, 16)), spec, AutoRoundOptions(steps=3))
    assert torch.equal(codes.codes, RTN.run(weight, None, spec, RtnOptions()).codes)
    assert codes.notes == ("rounded to nearest in place of autoround: no calibration input reached it",)


def test_autoround_refuses_missing_inputs_and_other_grids() -> None:
    weight, _ = problem(8, 16, 1)
    with pytest.raises(CalibrationError, match="autoround was given no Hessian"):
        METHOD.run(weight, None, integer_spec(4, 8, False, "float32"), AutoRoundOptions())
    whole = QuantSpec(bits=8, granularity=Granularity(strategy="tensor"))
    assert "row by row" in (METHOD.reason_against(whole) or "")
    assert "not nf" in (METHOD.reason_against(QuantSpec(kind="nf", bits=4, scale_dtype="float32",
                                                 granularity=Granularity(strategy="block", size=64))) or "")


def test_rows_are_learned_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, stats = problem(48, 64, 3, 400)
    spec = integer_spec(3, 32, False, "float32")
    whole = METHOD.run(weight, stats, spec, AutoRoundOptions(steps=40))
    learned = []
    learn = autoround._learn
    monkeypatch.setattr(autoround, "_learn", lambda *given: learned.append(len(given[0])) or learn(*given))
    monkeypatch.setattr(autoround, "TOGETHER", 20 * 64)
    parts = METHOD.run(weight, stats, spec, AutoRoundOptions(steps=40))
    assert learned == [20, 20, 8] and parts.codes.shape == whole.codes.shape
    # not bit for bit: sums are made in another order, and a sign may flip
    assert float(losses(parts, weight, stats).sum()) == pytest.approx(
        float(losses(whole, weight, stats).sum()), rel=0.02)
