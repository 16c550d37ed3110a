"""Coordinate descent: every step is the exact one, and none raises the loss."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.quantization.methods.descent import descend_levels, descend_scales
from quantkit.quantization.methods.grid import find_grid, from_grid, round_to_grid


def problem(rows, cols, seed, bits=3, size=8, symmetric=True):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(3 * cols, cols, generator=random) @ torch.randn(cols, cols, generator=random)
    weight = torch.randn(rows, cols, generator=random) * 0.1
    spec = QuantSpec(bits=bits, symmetric=symmetric, scale_dtype="float32",
                     granularity=Granularity(strategy="group", size=size))
    grid = find_grid(weight, spec)
    return weight, round_to_grid(weight, grid, spec), grid, x.T @ x / len(x), spec


def loss(weight, levels, grid, hessian):
    error = (weight - from_grid(levels, grid)).double()
    return ((error @ hessian.double()) * error).sum(1)


def visit(weight, levels, grid, hessian, spec, block):
    return descend_levels(weight[None], levels[None], [grid], hessian[None], spec, block)[0]


def one_by_one(weight, levels, grid, hessian, spec):
    """In float64, every weight alone: of all levels the one with the least loss, tried one by one."""
    found = levels.clone()
    for i in range(weight.shape[1]):
        tried = []
        for level in range(2**spec.bits):
            found[:, i] = level
            tried.append(loss(weight, found, grid, hessian))
        found[:, i] = torch.stack(tried).argmin(0).float()
    return found


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("block", [1, 5, 128])
def test_a_visit_puts_every_weight_where_it_is_best(bits, symmetric, block):
    weight, levels, grid, hessian, spec = problem(7, 24, bits, bits, symmetric=symmetric)
    found = visit(weight, levels, grid, hessian, spec, block)
    assert torch.equal(found, one_by_one(weight, levels, grid, hessian, spec))
    assert not torch.equal(found, levels)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rows=st.sampled_from([1, 3, 40]), groups=st.integers(1, 5), size=st.sampled_from([2, 8, 13]),
       bits=st.integers(2, 8), symmetric=st.booleans(), seed=st.integers(0, 999))
def test_the_loss_of_no_row_rises(rows, groups, size, bits, symmetric, seed):
    weight, levels, grid, hessian, spec = problem(rows, groups * size, seed, bits, size, symmetric)
    noise = 1e-5 * (weight.square().sum(1) * hessian.trace()).double()
    for _ in range(3):
        before = loss(weight, levels, grid, hessian)
        levels = visit(weight, levels, grid, hessian, spec, 128)
        between = loss(weight, levels, grid, hessian)
        grid = descend_scales(weight, levels, grid, hessian, spec, 2)
        after = loss(weight, levels, grid, hessian)
        assert (between <= before + noise).all() and (after <= between + noise).all()
        assert levels.min() >= 0 and levels.max() < 2**bits and torch.equal(levels, levels.round())


def test_at_the_end_nothing_moves():
    weight, levels, grid, hessian, spec = problem(9, 32, 1)
    for _ in range(60):
        levels = visit(weight, levels, grid, hessian, spec, 16)
    assert torch.equal(levels, visit(weight, levels, grid, hessian, spec, 128))


@pytest.mark.parametrize("rows", [1, 5])
def test_the_arguments_are_left_alone(rows):
    weight, levels, grid, hessian, spec = problem(rows, 16, 2)
    kept = [x.clone() for x in (weight, levels, grid.scale, grid.zero, hessian)]
    visit(weight, levels, grid, hessian, spec, 16)
    descend_scales(weight, levels, grid, hessian, spec, 2)
    assert all(torch.equal(a, b) for a, b in zip(kept, (weight, levels, grid.scale, grid.zero, hessian)))


@pytest.mark.parametrize("block", [1, 128])
def test_several_linears_at_once_are_visited_as_alone(block):
    made = [problem(7, 24, seed, symmetric=False) for seed in range(3)]
    weights, levels, grids, hessians, specs = zip(*made)
    found = descend_levels(torch.stack(weights), torch.stack(levels), grids, torch.stack(hessians), specs[0],
                           block)
    for mine, (weight, before, grid, hessian, spec) in zip(found, made, strict=True):
        assert torch.equal(mine, one_by_one(weight, before, grid, hessian, spec))
