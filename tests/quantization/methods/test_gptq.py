"""GPTQ: never worse than rounding, equal to the paper's column-by-column version, calm in trouble."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from quantkit.formats.base import Codes
from quantkit.formats.eight_bit import FLOAT as FLOATS
from quantkit.formats.level_values import dequantize
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.quantization.methods import gptq
from quantkit.quantization.methods.base import LayerStats
from quantkit.quantization.methods.gptq import METHOD, GptqOptions
from quantkit.quantization.methods.gptq_reference import solve_columns
from quantkit.quantization.methods.hessian import damped
from quantkit.quantization.methods.rounding import RTN, RtnOptions
from quantkit.support.errors import CalibrationError, SpecError
from tests.helpers.grids import GROUPED
from tests.helpers.quantized import integer_spec

DAMP = GptqOptions().damp
PAPER = {"clip_search": False, "refit": 0, "descent_passes": 0}


def problem(rows: int, cols: int, seed: int = 0,
            tokens: int | None = None) -> tuple[torch.Tensor, LayerStats]:
    """A weight and a Hessian of correlated inputs of very different sizes."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, cols, generator=random) * 0.05
    tokens = tokens or 4 * cols
    x = torch.randn(tokens, cols, generator=random) @ torch.randn(cols, cols, generator=random)
    x = x * torch.rand(cols, generator=random).pow(2).add(0.01)
    return weight, LayerStats(tokens, x.T @ x / tokens)


def values(codes: Codes) -> torch.Tensor:
    zero = 2 ** (codes.spec.bits - 1) if codes.zero is None else codes.zero.float().unsqueeze(-1)
    groups = codes.codes.float().reshape(*codes.scale.shape, -1) if codes.scale.numel() > 1 else (
        codes.codes.float().reshape(1, 1, -1))
    return ((groups - zero) * codes.scale.unsqueeze(-1)).reshape(codes.codes.shape)


def loss(codes: Codes, weight: torch.Tensor, stats: LayerStats) -> float:
    assert stats.hessian is not None
    error = (values(codes) - weight).double()
    return float(((error @ stats.hessian.double()) * error).sum())


@settings(max_examples=80, deadline=None, derandomize=True)
@given(bits=st.integers(2, 8), rows=st.sampled_from([1, 3, 17]), groups=st.integers(1, 4),
       size=st.sampled_from([None, 2, 8, 13]), symmetric=st.booleans(), act_order=st.booleans(),
       clip_search=st.booleans(), refit=st.integers(0, 2), descent_passes=st.integers(0, 2),
       block=st.sampled_from([1, 5, 128]), tokens=st.sampled_from([1, 5, 200]), seed=st.integers(0, 9999))
def test_loss_is_never_above_that_of_rounding(bits: int, rows: int, groups: int, size: int | None,
                                              symmetric: bool, act_order: bool, clip_search: bool, refit: int,
                                              descent_passes: int, block: int, tokens: int,
                                              seed: int) -> None:
    weight, stats = problem(rows, groups * (size or 11), seed, tokens)
    spec = integer_spec(bits, size, symmetric)
    options = GptqOptions(act_order=act_order, clip_search=clip_search, refit=refit,
                          descent_passes=descent_passes, block=block)
    solved = loss(METHOD.run(weight, stats, spec, options), weight, stats)
    rounded = loss(RTN.run(weight, None, spec, RtnOptions()), weight, stats)
    assert stats.hessian is not None
    noise = 1e-5 * float(weight.square().sum() * stats.hessian.diagonal().sum())
    assert solved <= rounded * (1 + 1e-4) + noise * 4.0**-bits


@pytest.mark.parametrize("strategy", ["tensor", "channel", "group"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_it_is_much_better_than_rounding(strategy: str, symmetric: bool) -> None:
    weight, stats = problem(32, 64)
    spec = QuantSpec(bits=4, symmetric=symmetric, scale_dtype="bfloat16", granularity=Granularity(
        strategy=strategy, size=16 if strategy == "group" else None))
    rounded = loss(RTN.run(weight, None, spec, RtnOptions()), weight, stats)
    paper = loss(METHOD.run(weight, stats, spec, GptqOptions(**PAPER)), weight, stats)
    ours = METHOD.run(weight, stats, spec, GptqOptions())
    assert paper < 0.6 * rounded
    assert loss(ours, weight, stats) < 0.6 * rounded
    assert ours.notes == ()


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize(("block", "kernels"), [(128, True), (1, False), (7, False), (128, False)])
def test_equals_the_paper(act_order: bool, bits: int, block: int, kernels: bool,
                          monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels for CPUs, and torch; the kernel for GPUs is beside the paper in tests/kernels."""
    if not kernels:
        monkeypatch.setattr(gptq, "solved_by_kernels", lambda spec, device: False)
    weight, stats = problem(8, 32, seed=bits)
    assert stats.hessian is not None
    spec = integer_spec(bits, 8, scale_dtype="float32")
    options = PAPER | {"act_order": act_order, "block": block}
    codes = METHOD.run(weight, stats, spec, GptqOptions(**options))
    rounded = RTN.run(weight, None, spec, RtnOptions())
    order = stats.hessian.diagonal().argsort(descending=True) if act_order else torch.arange(32)
    expected = solve_columns(weight, damped(stats.hessian, DAMP * float(stats.hessian.diagonal().mean())),
                             rounded.scale, torch.full_like(rounded.scale, 2.0 ** (bits - 1)),
                             torch.arange(32) // 8, order, bits).levels
    # a row may be kept rounded; the others may differ where float32 meets a tie, which here is nowhere
    same = (codes.codes == expected).all(1)
    kept = (codes.codes == rounded.codes).all(1)
    assert same.sum() >= 6 and (same | kept).all()


def test_each_addition_lowers_the_loss() -> None:
    """Over several problems: the clip search, the refit and the visits, for symmetric 3-bit groups."""
    steps = {"paper": PAPER, "search": {"refit": 0, "descent_passes": 0}, "refit": {"descent_passes": 0},
             "descent_passes": {}}
    total = dict.fromkeys(steps, 0.0)
    for seed in range(6):
        weight, stats = problem(48, 64, seed)
        for name, options in steps.items():
            codes = METHOD.run(weight, stats, integer_spec(3, 32), GptqOptions(**options))
            total[name] += loss(codes, weight, stats)
    assert total["descent_passes"] < total["refit"] < total["search"] < total["paper"]


def test_refitted_scales_are_rounded_as_stored() -> None:
    weight, stats = problem(16, 64)
    for dtype in ("bfloat16", "float16"):
        codes = METHOD.run(weight, stats, integer_spec(4, 16, scale_dtype=dtype), GptqOptions())
        assert torch.equal(codes.scale, codes.scale.to(getattr(torch, dtype)).float())
        assert codes.spec.scale_dtype == dtype


def test_dead_inputs() -> None:
    """Columns that calibration never saw cost nothing and are rounded like any others."""
    weight, stats = problem(6, 32)
    assert stats.hessian is not None
    hessian = stats.hessian.clone()
    hessian[[3, 17]] = 0
    hessian[:, [3, 17]] = 0
    stats = LayerStats(stats.tokens, hessian)
    codes = METHOD.run(weight, stats, integer_spec(8, 16), GptqOptions(**PAPER))
    assert torch.allclose(values(codes)[:, [3, 17]], weight[:, [3, 17]], atol=2e-3)
    assert bool(torch.isfinite(values(METHOD.run(weight, stats, integer_spec(4, 16), GptqOptions()))).all())


@settings(max_examples=30, deadline=None, derandomize=True)
@given(strategy=st.sampled_from(["tensor", "channel"]), rows=st.sampled_from([1, 3, 17]),
       cols=st.sampled_from([11, 32]), act_order=st.booleans(), clip_search=st.booleans(),
       refit=st.integers(0, 2), descent_passes=st.integers(0, 2), seed=st.integers(0, 9999))
def test_floats_are_never_worse_than_rounded(strategy: str, rows: int, cols: int, act_order: bool,
                                             clip_search: bool, refit: int, descent_passes: int,
                                             seed: int) -> None:
    weight, stats = problem(rows, cols, seed)
    spec = QuantSpec(kind="fp", bits=8, scale_dtype="bfloat16", granularity=Granularity(strategy=strategy))
    options = GptqOptions(act_order=act_order, clip_search=clip_search, refit=refit,
                          descent_passes=descent_passes)

    def lost(codes: Codes) -> float:
        error = (FLOATS.dequantize(FLOATS.pack(codes, torch.bfloat16)) - weight).double()
        return float(((error @ stats.hessian.double()) * error).sum())

    rounded = lost(RTN.run(weight, None, spec, RtnOptions()))
    assert lost(METHOD.run(weight, stats, spec, options)) <= rounded * 1.0001 + 1e-12


@pytest.mark.parametrize("tiles", [True, False])
@pytest.mark.parametrize("spec", GROUPED.values(), ids=GROUPED)
def test_every_grid_is_solved_far_below_rounding(spec: QuantSpec, tiles: bool,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """By our kernels, and by torch where there are none."""
    if not tiles:
        monkeypatch.setattr(gptq, "solved_by_kernels", lambda spec, device: False)
    weight, stats = problem(70, 128)
    assert stats.hessian is not None

    def off(codes: Codes) -> float:
        error = (dequantize(codes) - weight).double()
        return float(((error @ stats.hessian.double()) * error).sum())

    rounded = off(RTN.run(weight, None, spec, RtnOptions(clip_search=True)))
    paper = off(METHOD.run(weight, stats, spec, GptqOptions(**PAPER)))
    ours = METHOD.run(weight, stats, spec, GptqOptions())
    assert paper < 0.6 * rounded
    assert off(ours) < 0.95 * paper
    assert ours.notes == ()


@pytest.mark.parametrize("spec", GROUPED.values(), ids=GROUPED)
def test_kernels_and_torch_solve_every_grid_alike(spec: QuantSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, stats = problem(64, 128, 3)
    tiled = METHOD.run(weight, stats, spec, GptqOptions(**PAPER))
    monkeypatch.setattr(gptq, "solved_by_kernels", lambda spec, device: False)
    plain = METHOD.run(weight, stats, spec, GptqOptions(**PAPER))
    assert torch.equal(tiled.scale, plain.scale)
    assert (tiled.codes == plain.codes).float().mean() > 0.99


def test_no_input_at_all_falls_back_to_rounding_with_a_note() -> None:
    weight, _ = problem(6, 32)
    codes = METHOD.run(weight, LayerStats(9, torch.zeros(32, 32)), integer_spec(4, 16), GptqOptions())
    assert torch.equal(codes.codes, RTN.run(weight, None, integer_spec(4, 16), RtnOptions()).codes)
    assert len(codes.notes) == 1 and "no calibration input" in codes.notes[0]


def test_damping_is_raised_until_the_factorization_works_and_noted() -> None:
    weight, stats = problem(6, 32)
    assert stats.hessian is not None
    mean = float(stats.hessian.diagonal().mean())
    direction = torch.ones(32, 1) / 32**0.5
    lowest = float(direction.T @ stats.hessian @ direction)
    indefinite = stats.hessian - (lowest + 0.5 * mean) * direction @ direction.T
    codes = METHOD.run(weight, LayerStats(9, indefinite), integer_spec(4, 16), GptqOptions())
    assert any(f"damping raised from {DAMP:g} to" in note for note in codes.notes)


def test_hopeless_hessian_falls_back_with_a_note() -> None:
    weight, _ = problem(6, 32)
    hopeless = torch.full((32, 32), 100.0) - 99 * torch.eye(32)
    codes = METHOD.run(weight, LayerStats(9, hopeless), integer_spec(4, 16), GptqOptions())
    assert torch.equal(codes.codes, RTN.run(weight, None, integer_spec(4, 16), RtnOptions()).codes)
    assert "not positive definite" in codes.notes[0]


@pytest.mark.parametrize("weight", [
    torch.zeros(3, 16), -torch.zeros(3, 16), torch.full((3, 16), 0.5), torch.full((3, 16), 1e-41),
    torch.full((3, 16), 65504.0), torch.tensor([[0.0] * 15 + [1000.0]] * 3)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_awkward_weights(weight: torch.Tensor, symmetric: bool) -> None:
    _, stats = problem(3, 16)
    for dtype in ("bfloat16", "float16"):
        spec = integer_spec(4, 8, symmetric, dtype)
        codes = METHOD.run(weight, stats, spec, GptqOptions())
        assert bool((codes.scale > 0).all()) and bool(torch.isfinite(values(codes)).all())
        rounded = RTN.run(weight, None, spec, RtnOptions())
        assert loss(codes, weight, stats) <= loss(rounded, weight, stats) * 1.0001


def test_the_arguments_are_left_alone_and_the_result_is_the_same_twice() -> None:
    weight, stats = problem(16, 64)
    assert stats.hessian is not None
    before = weight.clone(), stats.hessian.clone()
    one, two = (METHOD.run(weight, stats, integer_spec(4, 16, False), GptqOptions()) for _ in range(2))
    assert torch.equal(weight, before[0]) and torch.equal(stats.hessian, before[1])
    assert torch.equal(one.codes, two.codes) and torch.equal(one.scale, two.scale)


def test_bad_statistics() -> None:
    weight, stats = problem(4, 16)
    assert stats.hessian is not None
    for broken, said in ((None, "no Hessian"), (LayerStats(3), "no Hessian"),
                         (LayerStats(3, torch.eye(8)), "16 inputs"),
                         (LayerStats(3, stats.hessian * float("nan")), "NaN")):
        with pytest.raises(CalibrationError, match=said):
            METHOD.run(weight, broken, integer_spec(4, 8), GptqOptions())
    with pytest.raises(SpecError, match="NaN or infinite"):
        METHOD.run(weight * float("inf"), stats, integer_spec(4, 8), GptqOptions())


@pytest.mark.parametrize("wrong", [{"damp": 0}, {"damp": 2}, {"block": 0}, {"refit": -1},
                                   {"descent_passes": -1}, {"actorder": True}])
def test_options_are_checked(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        GptqOptions(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"act_order": False, "descent_passes": 3}, PAPER])
@pytest.mark.parametrize("size", [None, 8])
def test_several_at_once_come_to_what_each_comes_to_alone(size, options):
    spec, chosen = integer_spec(4, size, symmetric=False), GptqOptions(**options)
    problems = [problem(9, 48, seed) for seed in range(3)]
    unreached = LayerStats(0, torch.zeros(48, 48))
    weights = [weight for weight, _ in problems] + [problems[0][0]]
    stats = [stats for _, stats in problems] + [unreached]
    found = METHOD.run_batch(weights, stats, spec, chosen)
    for codes, weight, own in zip(found, weights, stats, strict=True):
        alone = METHOD.run(weight, own, spec, chosen)
        assert codes.notes == alone.notes
        # sums in another order may tip a level that is nearly halfway
        assert (codes.codes != alone.codes).float().mean() < 0.02
        assert loss(codes, weight, own) <= 1.02 * loss(alone, weight, own)
    assert "no calibration input" in found[-1].notes[0]


def test_a_block_is_never_wider_than_the_weight() -> None:
    weight, stats = problem(8, 32)
    wide, usual = (METHOD.run(weight, stats, integer_spec(4, 8), GptqOptions(block=size))
                   for size in (10**11, 32))
    assert torch.equal(wide.codes, usual.codes) and torch.equal(wide.scale, usual.scale)
