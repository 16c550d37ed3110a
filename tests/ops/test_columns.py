"""GPTQ's loops over the columns of a weight: the kernels do what torch does, and every step is exact."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.ops import columns
from quantkit.quantization.methods import gptq
from quantkit.quantization.methods.base import LayerStats
from quantkit.quantization.methods.gptq import GptqOptions
from quantkit.quantization.methods.grid import SHRINKS, Grid, find_grid, from_grid, round_to_grid


def group_spec(bits, size, symmetric, dtype="bfloat16"):
    return QuantSpec(bits=bits, symmetric=symmetric, scale_dtype=dtype,
                     granularity=Granularity(strategy="group", size=size))


def problem(rows, count, seed=0):
    """A weight and a Hessian of correlated inputs of different sizes."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, count, generator=random) * 0.05
    x = torch.randn(3 * count, count, generator=random) @ torch.randn(count, count, generator=random)
    x = x * torch.rand(count, generator=random).add(0.05)
    return weight, x.T @ x / len(x)


def tiled_grid(grid):
    return columns.tiles(grid.scale, 1.0), columns.tiles(grid.zero)


def untiled(scale, zero, rows):
    return Grid(columns.untile(scale, rows), columns.untile(zero, rows))


def slopes_of(weight, levels, grid, hessian):
    return columns.tiles(((weight - from_grid(levels, grid)).double() @ hessian.double()).float())


def loss(weight, levels, grid, hessian):
    error = (weight - from_grid(levels, grid)).double()
    return ((error @ hessian.double()) * error).sum(1)


@pytest.mark.parametrize("rows", [1, 64, 100])
def test_tiles_and_back(rows):
    weight = torch.randn(rows, 24)
    tiled = columns.tiles(weight)
    assert tiled.shape == (-(-rows // 64), 24, 64)
    assert torch.equal(columns.untile(tiled, rows), weight)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_range_is_as_good_as_the_search_in_torch(bits, symmetric, dtype):
    weight, hessian = problem(70, 96)
    spec = group_spec(bits, 32, symmetric, dtype)
    expected = find_grid(weight, spec, importance=hessian.diagonal(), shrinks=SHRINKS)
    scale, zero = columns.search_ranges(columns.tiles(weight), hessian.diagonal(), 32, SHRINKS, bits,
                                        symmetric, dtype)
    grid = untiled(scale, zero, 70)
    assert torch.equal(grid.scale, grid.scale.to(getattr(torch, dtype)).float())

    def errors(grid):
        off = (weight - from_grid(round_to_grid(weight, grid, spec), grid)).square() * hessian.diagonal()
        return off.reshape(70, 3, 32).sum(-1)

    torch.testing.assert_close(errors(grid), errors(expected), rtol=1e-4, atol=0)
    assert (grid.scale == expected.scale).float().mean() > 0.97


@pytest.mark.parametrize("symmetric", [True, False])
def test_no_level_overflows_the_dtype_of_the_scales(symmetric):
    weight, hessian = problem(64, 64)
    weight = weight * (65000 / weight.abs().max())
    spec = group_spec(4, 32, symmetric, "float16")
    codes = gptq.quantize(weight, LayerStats(1, hessian), spec, GptqOptions())
    zero = codes.zero.float() if codes.zero is not None else torch.full_like(codes.scale, 8.0)
    assert torch.equal(codes.scale, codes.scale.half().float())
    assert (codes.scale * torch.maximum(zero, 15 - zero)).max() <= 65504


@settings(max_examples=40, deadline=None, derandomize=True)
@given(rows=st.sampled_from([1, 40, 65]), groups=st.integers(1, 5), size=st.sampled_from([2, 8, 13, 64]),
       bits=st.integers(2, 8), symmetric=st.booleans(), descent_passes=st.integers(0, 3),
       refits=st.integers(0, 3), seed=st.integers(0, 999))
def test_descent_raises_the_loss_of_no_row(rows, groups, size, bits, symmetric, descent_passes, refits,
                                           seed):
    weight, hessian = problem(rows, groups * size, seed)
    spec = group_spec(bits, size, symmetric)
    grid = find_grid(weight, spec)
    levels = round_to_grid(weight, grid, spec)
    scale, zero = tiled_grid(grid)
    tiled, slopes = columns.tiles(levels), slopes_of(weight, levels, grid, hessian)
    columns.descend_columns(slopes, tiled, scale, zero, hessian, bits, "bfloat16", descent_passes, refits)
    better, better_levels = untiled(scale, zero, rows), columns.untile(tiled, rows)
    assert torch.equal(better_levels, better_levels.round()) and better_levels.min() >= 0
    assert better_levels.max() < 2**bits
    assert torch.equal(better.scale, better.scale.bfloat16().float()) and (better.scale > 0).all()
    before, after = loss(weight, levels, grid, hessian), loss(weight, better_levels, better, hessian)
    noise = 1e-6 * (weight.double().square().sum(1) * float(hessian.diagonal().sum()))
    assert (after <= before * (1 + 1e-5) + noise * 4.0**-bits).all()
    # the slopes are still those of the errors
    expected = slopes_of(weight, better_levels, better, hessian)
    torch.testing.assert_close(slopes, expected, rtol=0, atol=2e-4 * float(expected.abs().max() + 1e-3))


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_visit_puts_every_weight_where_it_is_best(symmetric):
    weight, hessian = problem(7, 24)
    spec = group_spec(3, 8, symmetric, "float32")
    grid = find_grid(weight, spec)
    levels = round_to_grid(weight, grid, spec)
    scale, zero = tiled_grid(grid)
    tiled = columns.tiles(levels)
    slopes = slopes_of(weight, levels, grid, hessian)
    columns.descend_columns(slopes, tiled, scale, zero, hessian, 3, None, 1, 0)
    expected = levels.clone()
    for i in range(24):
        tried = []
        for level in range(8):
            expected[:, i] = level
            tried.append(loss(weight, expected, grid, hessian))
        expected[:, i] = torch.stack(tried).argmin(0).float()
    assert torch.equal(columns.untile(tiled, 7), expected)
    assert not torch.equal(expected, levels)


def test_a_refit_puts_a_scale_where_it_is_best():
    weight, hessian = problem(5, 8)
    spec = group_spec(3, 8, True, "float32")
    grid = find_grid(weight, spec)
    levels = round_to_grid(weight, grid, spec)
    scale, zero = tiled_grid(grid)
    columns.descend_columns(slopes_of(weight, levels, grid, hessian), columns.tiles(levels), scale, zero,
                            hessian, 3, "float32", 0, 1)
    unit = (levels - grid.zero).double()
    best = ((weight.double() @ hessian.double()) * unit).sum(1) / ((unit @ hessian.double()) * unit).sum(1)
    torch.testing.assert_close(columns.untile(scale, 5)[:, 0].double(), best, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("strategy", "size"), [("group", 32), ("group", 288), ("channel", None)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_kernels_solve_as_well_as_torch(strategy, size, symmetric, monkeypatch):
    weight, hessian = problem(70, 288)
    spec = QuantSpec(bits=4, symmetric=symmetric, scale_dtype="bfloat16",
                     granularity=Granularity(strategy=strategy, size=size))
    stats, options = LayerStats(1, hessian), GptqOptions(descent_passes=2)

    def solved(**changes):
        codes = gptq.quantize(weight, stats, spec, options.model_copy(update=changes))
        zero = codes.zero.float() if codes.zero is not None else torch.full_like(codes.scale, 8.0)
        return float(loss(weight, codes.codes.float(), Grid(codes.scale.float(), zero), hessian).sum())

    plain = {"descent_passes": 0, "refit": 0}
    ours, ours_plain = solved(), solved(**plain)
    monkeypatch.setattr(gptq, "solved_by_kernels", lambda *_: False)
    assert ours == pytest.approx(solved(), rel=0.01)
    assert ours_plain == pytest.approx(solved(**plain), rel=1e-3)
    assert ours < 0.985 * ours_plain


@pytest.mark.parametrize("damp", [0.05, 1.0])
def test_rows_are_kept_rounded_only_where_rounding_is_better(damp):
    weight, hessian = problem(64, 128)
    hessian[:3] *= 30  # inputs that are large, as a few of every model are
    hessian[:, :3] *= 30
    spec, stats = group_spec(4, 32, False), LayerStats(1, hessian)
    codes = gptq.quantize(weight, stats, spec, GptqOptions(damp=damp))
    plain = find_grid(weight, spec)
    rounded = loss(weight, round_to_grid(weight, plain, spec), plain, hessian)
    solved = loss(weight, codes.codes.float(), Grid(codes.scale.float(), codes.zero.float()), hessian)
    same = (codes.codes.float() == round_to_grid(weight, plain, spec)).all(1)
    assert (solved <= rounded * (1 + 1e-4)).all() and same.sum() <= 3
    assert solved.sum() < 0.9 * rounded.sum() and not codes.notes


def test_the_same_bits_with_any_number_of_threads():
    code = ("import sys, torch; torch.set_num_threads(int(sys.argv[1])); torch.manual_seed(0)\n"
            "from quantkit.ops import columns\n"
            "w = columns.tiles(torch.randn(300, 128)); h = torch.eye(128) + 0.1\n"
            "s, z = columns.search_ranges(w, h[0], 32, (1.0, 0.9), 4, False, 'bfloat16')\n"
            "u = torch.linalg.cholesky(h).T\n"
            "v = columns.solve_columns(w.clone(), u, s, z, torch.arange(128) // 32, 4)\n"
            "columns.descend_columns(w, v, s, z, h, 4, 'bfloat16', 2, 1)\n"
            "print(v.double().sum().item(), s.double().sum().item(), w.double().sum().item())")
    first, second = (subprocess.run([sys.executable, "-c", code, threads], capture_output=True, text=True,
                               check=True).stdout for threads in ("1", "2"))
    assert first == second != ""
