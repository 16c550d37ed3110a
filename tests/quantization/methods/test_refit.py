"""Descent over scales, minima and superblocks' numbers: no step raises the loss, and what fits is reached."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.formats.spec import QuantSpec
from quantkit.quantization.methods.descent import refit_scales
from quantkit.quantization.methods.grid import Grid, choose_grid, from_grid, round_to_grid
from tests.helpers.grids import GROUPED


def problem(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(3 * columns, columns, generator=random) @ torch.randn(columns, columns, generator=random)
    return torch.randn(rows, columns, generator=random) * 0.1, x.T @ x / len(x)


def loss(weight: torch.Tensor, levels: torch.Tensor, grid: Grid, hessian: torch.Tensor) -> torch.Tensor:
    error = (weight - from_grid(levels, grid)).double()
    return ((error @ hessian.double()) * error).sum(1)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(name=st.sampled_from(sorted(GROUPED)), rows=st.sampled_from([1, 5]), blocks=st.integers(1, 3),
       rounds=st.integers(1, 3), seed=st.integers(0, 9999))
def test_the_loss_of_no_row_rises(name: str, rows: int, blocks: int, rounds: int, seed: int) -> None:
    spec = GROUPED[name]
    weight, hessian = problem(rows, 64 * blocks, seed)
    grid = choose_grid(weight, spec)
    levels = round_to_grid(weight, grid, spec)
    refitted = refit_scales(weight, levels, grid, hessian, spec, rounds)
    before, after = loss(weight, levels, grid, hessian), loss(weight, levels, refitted, hessian)
    assert bool((after <= before * (1 + 1e-4) + 1e-9).all())


@pytest.mark.parametrize("name", GROUPED)
def test_it_lowers_the_loss_and_keeps_to_what_is_stored(name: str) -> None:
    spec = GROUPED[name]
    weight, hessian = problem(16, 192, 3)
    grid = choose_grid(weight, spec)
    levels = round_to_grid(weight, grid, spec)
    refitted = refit_scales(weight, levels, grid, hessian, spec, 3)
    gain = 1.0 + 1e-6 if spec.scale_dtype == "e8m0" else 0.95  # to another power of 2 it is far
    assert loss(weight, levels, refitted, hessian).sum() < gain * loss(weight, levels, grid, hessian).sum()
    for values, outer in ((refitted.scale, refitted.outer), (refitted.minimum, refitted.outer_minimum)):
        if values is None or spec.scale_dtype in ("e4m3", "e8m0"):
            continue
        stored = values if outer is None else outer
        dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}[spec.scale_dtype]
        assert torch.equal(stored, stored.to(dtype).float())
        if outer is not None:
            counts = values / outer.repeat_interleave(4, dim=1)
            assert torch.equal(counts, counts.round())


def test_scales_that_were_disturbed_are_found_again() -> None:
    spec: QuantSpec = GROUPED["minima"].model_copy(update={"scale_dtype": "float32"})
    weight, hessian = problem(6, 64, 5)
    grid = choose_grid(weight, spec)
    levels = round_to_grid(weight, grid, spec)
    exact = from_grid(levels, grid)
    assert grid.minimum is not None
    disturbed = Grid(grid.scale * 1.05, grid.zero, grid.minimum * 0.97)
    refitted = refit_scales(exact, levels, disturbed, hessian, spec, 60)
    size = loss(exact, torch.zeros_like(levels), Grid(torch.zeros_like(grid.scale), grid.zero), hessian)
    assert loss(exact, levels, disturbed, hessian).sum() > 1e-4 * size.sum()
    assert loss(exact, levels, refitted, hessian).sum() < 1e-6 * size.sum()


def test_the_arguments_are_left_alone() -> None:
    spec = GROUPED["superblocks with minima"]
    weight, hessian = problem(4, 128, 6)
    grid = choose_grid(weight, spec)
    levels = round_to_grid(weight, grid, spec)
    tensors = [weight, levels, hessian, grid.scale, grid.minimum, grid.outer, grid.outer_minimum]
    before = [tensor.clone() for tensor in tensors if tensor is not None]
    refit_scales(weight, levels, grid, hessian, spec, 2)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, before, strict=True)
               if tensor is not None)
    assert refit_scales(weight, levels, grid, hessian, spec, 0) is grid
