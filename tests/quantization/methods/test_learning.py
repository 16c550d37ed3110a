"""Learned rounding after GPTQ: it leaves places that coordinate descent can't, and makes no row worse."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.formats.spec import QuantSpec
from quantkit.quantization.methods import gptq_tiles
from quantkit.quantization.methods.base import LayerStats
from quantkit.quantization.methods.descent import descend_levels
from quantkit.quantization.methods.gptq import METHOD, GptqOptions
from quantkit.quantization.methods.gptq import quantize as gptq
from quantkit.quantization.methods.grid import Grid, find_grid, from_grid, round_to_grid
from quantkit.quantization.methods.learning import learn_levels
from tests.helpers.quantized import integer_spec


def problem(rows: int, cols: int, seed: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, cols, generator=random) @ torch.randn(cols, cols, generator=random)
    hessian = x.T @ x / tokens
    hessian.diagonal().add_(0.05 * hessian.diagonal().mean())
    return torch.randn(rows, cols, generator=random) * 0.05, hessian


def loss(weight: torch.Tensor, levels: torch.Tensor, grid: Grid, hessian: torch.Tensor) -> torch.Tensor:
    error = (weight - from_grid(levels, grid)).double()
    return ((error @ hessian.double()) * error).sum(1)


def settled(weight: torch.Tensor, hessian: torch.Tensor, spec: QuantSpec, grid: Grid) -> torch.Tensor:
    """Levels of which no single one can be moved to lower the loss."""
    levels = round_to_grid(weight, grid, spec)
    for _ in range(100):
        before = levels
        levels = descend_levels(weight[None], before[None], [grid], hessian[None], spec, 128)[0]
        if torch.equal(levels, before):
            return levels
    raise AssertionError("coordinate descent goes on and on")


@settings(max_examples=40, deadline=None, derandomize=True)
@given(bits=st.integers(2, 8), rows=st.sampled_from([1, 17]), groups=st.integers(1, 3),
       size=st.sampled_from([2, 13, 32]), symmetric=st.booleans(), steps=st.integers(1, 12),
       tokens=st.sampled_from([1, 5, 200]), seed=st.integers(0, 9999))
def test_no_row_is_worse_than_its_start(bits: int, rows: int, groups: int, size: int, symmetric: bool,
                                        steps: int, tokens: int, seed: int) -> None:
    weight, hessian = problem(rows, groups * size, seed, tokens)
    spec = integer_spec(bits, size, symmetric, "float32")
    grid = find_grid(weight, spec)
    start = round_to_grid(weight, grid, spec)
    learned = learn_levels(weight, start, grid, hessian, spec, steps, 128)
    assert torch.equal(learned, learned.round()) and learned.min() >= 0 and learned.max() <= 2**bits - 1
    before, after = loss(weight, start, grid, hessian), loss(weight, learned, grid, hessian)
    assert (after <= before * (1 + 1e-4) + 1e-9).all()


@pytest.mark.parametrize("bits", [2, 4])
def test_it_gets_out_of_where_coordinate_descent_is_stuck(bits: int) -> None:
    weight, hessian = problem(64, 96, bits, 400)
    spec = integer_spec(bits, 32, False, "float32")
    grid = find_grid(weight, spec)
    start = settled(weight, hessian, spec, grid)
    learned = learn_levels(weight, start, grid, hessian, spec, 100, 128)
    before, after = loss(weight, start, grid, hessian), loss(weight, learned, grid, hessian)
    assert (after < before).float().mean() > 0.3 and after.sum() < 0.995 * before.sum()


def test_a_group_of_zeros_that_nothing_reaches_does_not_stop_its_rows() -> None:
    """Its scale is almost nothing, and so is the product with what its inputs were damped to."""
    weight, hessian = problem(64, 96, 4, 400)
    weight[:, :32] = 0
    hessian[:32] = hessian[:, :32] = 0
    hessian.diagonal()[:32] = 1e-4
    spec = integer_spec(4, 32, False, "bfloat16")
    grid = find_grid(weight, spec)
    start = settled(weight, hessian, spec, grid)
    before = loss(weight, start, grid, hessian)
    after = loss(weight, learn_levels(weight, start, grid, hessian, spec, 100, 128), grid, hessian)
    assert (after < before).float().mean() > 0.3


def test_a_budget_measures_without_it() -> None:
    assert GptqOptions(**{"learning_steps": 50, **METHOD.quick}).learning_steps == 0


@pytest.mark.parametrize("kernels", [True, False])
def test_as_an_option_of_gptq(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels:
        monkeypatch.setattr(gptq_tiles, "takes", lambda *_: False)
    weight, hessian = problem(96, 64, 5, 400)
    spec = integer_spec(3, 32, False, "float32")

    def solved(steps: int) -> float:
        codes = gptq(weight, LayerStats(400, hessian), spec, GptqOptions(learning_steps=steps))
        assert codes.zero is not None
        grid = Grid(codes.scale, codes.zero.float())
        return float(loss(weight, codes.codes.float(), grid, hessian).sum())

    assert solved(60) < 0.999 * solved(0)
