"""Scales of signed grids, of grids with minima or superblocks, and of 4-bit floats."""

from __future__ import annotations

import pytest
import torch

from quantkit.formats.spec import QuantSpec
from quantkit.quantization.methods.grid import (
    choose_grid,
    from_grid,
    round_to_grid,
)
from quantkit.quantization.methods.stored_scales import (
    rounded_scale,
)
from tests.helpers.grids import GROUPED


def weight_of(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=random) * 0.05 * torch.rand(rows, 1, generator=random)


def error_of(weight: torch.Tensor, spec: QuantSpec, importance: torch.Tensor, search: bool) -> torch.Tensor:
    grid = choose_grid(weight, spec, importance=importance, search=search)
    off = from_grid(round_to_grid(weight, grid, spec), grid) - weight
    return (off.square() * importance).sum()


@pytest.mark.parametrize("spec", GROUPED.values(), ids=GROUPED)
def test_a_search_lowers_the_error_that_it_searches(spec: QuantSpec) -> None:
    weight = weight_of(24, 128)
    importance = torch.rand(128, generator=torch.Generator().manual_seed(1)) + 0.1
    assert error_of(weight, spec, importance, True) < 0.95 * error_of(weight, spec, importance, False)


@pytest.mark.parametrize("search", [True, False])
@pytest.mark.parametrize("spec", GROUPED.values(), ids=GROUPED)
def test_a_group_of_a_row_knows_nothing_of_other_rows(spec: QuantSpec, search: bool) -> None:
    weight = weight_of(40, 128)
    outer = torch.full((1, 1), 2e-5) if spec.scale_dtype == "e4m3" else None
    together, alone = choose_grid(weight, spec, search=search, outer=outer), choose_grid(
        weight[7:8].clone(), spec, search=search, outer=outer)
    for name in ("scale", "minimum", "outer", "outer_minimum"):
        tensor, single = getattr(together, name), getattr(alone, name)
        assert (tensor is None) == (single is None)
        assert tensor is None or torch.equal(tensor[7:8] if len(tensor) > 1 else tensor, single), name


@pytest.mark.parametrize("search", [True, False])
def test_superblocks_have_whole_multiples(search: bool) -> None:
    spec = GROUPED["superblocks with minima"]
    grid = choose_grid(weight_of(9, 192), spec, search=search)
    assert grid.outer is not None and grid.outer_minimum is not None and grid.minimum is not None
    for values, outer, lowest in ((grid.scale, grid.outer, 1), (-grid.minimum, grid.outer_minimum, 0)):
        assert torch.equal(outer, outer.half().float())
        counts = values / outer.repeat_interleave(4, dim=1)
        assert torch.equal(counts, counts.round())
        assert counts.min() >= lowest and counts.max() <= 63


def test_the_heavier_side_gets_the_farther_level() -> None:
    spec = GROUPED["signed"]
    weight = torch.tensor([[0.8, -0.1, 0.2, 0.3] * 4, [-0.8, 0.1, -0.2, -0.3] * 4])
    grid = choose_grid(weight, spec)
    assert grid.scale.flatten().tolist() == pytest.approx([-0.1, 0.1], rel=1e-3)
    assert torch.equal(round_to_grid(weight, grid, spec)[:, 0], torch.zeros(2))
    back = from_grid(round_to_grid(weight, grid, spec), grid)
    torch.testing.assert_close(back, weight, rtol=1e-3, atol=1e-5)


def test_weights_on_a_grid_with_minima_come_back() -> None:
    spec = GROUPED["minima"].model_copy(update={"scale_dtype": "float32"})
    levels = torch.arange(16.0).flip(0).repeat(5, 2)
    weight = (levels * 0.25 + 3.0) * torch.arange(1.0, 6.0).unsqueeze(1)
    grid = choose_grid(weight, spec, search=True)
    back = from_grid(round_to_grid(weight, grid, spec), grid)
    torch.testing.assert_close(back, weight, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", GROUPED.values(), ids=GROUPED)
def test_zeros_and_equal_weights(spec: QuantSpec) -> None:
    for value in (0.0, 0.25, -0.25):
        weight = torch.full((3, 64), value)
        for search in (True, False):
            grid = choose_grid(weight, spec, search=search)
            assert bool(torch.isfinite(grid.scale).all()) and not bool((grid.scale == 0).any())
            back = from_grid(round_to_grid(weight, grid, spec), grid)
            torch.testing.assert_close(back, weight, rtol=0.26, atol=1e-6)


def test_powers_of_two_are_the_nearest() -> None:
    spec = GROUPED["mxfp4"]
    scales = torch.tensor([1.0, 1.49, 1.51, 3.0, 0.3, 1e-38, 5e37, 0.0])
    rounded = rounded_scale(scales, spec)
    assert rounded[:5].tolist() == [1.0, 1.0, 2.0, 4.0, 0.25]
    assert bool((torch.frexp(rounded)[0] == 0.5).all())
    assert (rounded[:7] / scales[:7]).log2().abs().max() <= 0.585
