"""GPTQ on a CPU: our own kernels take all columns of 64 rows at a time (:mod:`quantkit.ops.columns`)."""

from __future__ import annotations

import torch

from quantkit.formats.dtypes import dtype_name, scale_dtype
from quantkit.formats.spec import QuantSpec
from quantkit.ops import columns
from quantkit.quantization.methods.descent import descend_scales
from quantkit.quantization.methods.grid import SHRINKS, Grid, above_minima, from_grid, rising
from quantkit.quantization.methods.group_scales import choose_grid
from quantkit.quantization.methods.hessian import HessianFactors
from quantkit.quantization.methods.refit import refit_scales


def takes(spec: QuantSpec, device: torch.device) -> bool:
    """Whether the kernels solve this: at most 256 levels, but no 8-bit floats, and scales that belong to one
    row each."""
    return ((spec.kind in ("int", "iq") or spec.grid == "fp4")
            and spec.granularity.strategy in ("channel", "group") and columns.by_kernel(device))


def plain(spec: QuantSpec) -> bool:
    """Whether a scale is a positive number by itself, in a dtype, and a zero a level: the kernels then choose
    scales too."""
    return spec.grid == "int" and not spec.signed


def solve(weight: torch.Tensor, factors: HessianFactors, grid: Grid, spec: QuantSpec,
          costs: torch.Tensor | None, pull: float) -> tuple[torch.Tensor, Grid]:
    """Choose ranges and solve the columns.

    Args:
        weight: float32 ``[rows, in]``.
        factors: of the damped Hessian.
        grid: that of plain rounding, used where there is no search.
        spec: which :func:`takes`.
        costs: float32 ``[in]``, of a column's squared error, to search for ranges by; ``None``: no search.
        pull: share of a column's move by earlier errors that is taken back before it is rounded.

    Returns:
        Levels ``[tiles, in, 64]``, uint8 or, of a table, float16; and their grid.
    """
    size, rows, order = weight.shape[1] // grid.scale.shape[1], len(weight), factors.order
    if costs is None:
        scale, zero = columns.tiles(grid.scale, 1.0), columns.tiles(grid.zero)
    elif plain(spec):
        scale, zero = columns.search_ranges(columns.tiles(weight), costs, size, SHRINKS, spec.bits,
                                            spec.symmetric, dtype_name(scale_dtype(spec)))
        grid = _rows_of(scale, zero, rows)
    else:
        grid = choose_grid(weight, spec, importance=costs, search=True, outer=grid.outer)
        scale, zero = columns.tiles(grid.scale, 1.0), columns.tiles(grid.zero)
    tiled = columns.tiles(above_minima(weight, grid))[:, order]
    table = rising(spec)
    solved = columns.solve_columns(tiled, factors.upper, scale, zero, order // size, spec.bits, pull, table)
    stored = solved.to(torch.float16 if table else torch.uint8)
    levels = torch.empty_like(stored)
    levels[:, order] = stored
    return levels, grid


def descend(weight: torch.Tensor, levels: torch.Tensor, grid: Grid, form: torch.Tensor, spec: QuantSpec,
            descent_passes: int, refits: int) -> tuple[torch.Tensor, Grid]:
    """Coordinate descent on what :func:`solve` has returned.

    Args:
        weight: float32 ``[rows, in]``.
        levels, grid: where to start.
        form: float32 ``[in, in]``, the damped Hessian.
        spec: kind, bits and how scales are stored.
        descent_passes: passes over the levels, and over the scales.
        refits: passes over the scales after them; 0: scales stay as they are.

    Returns:
        Levels float32 ``[rows, in]`` and their grid.
    """
    levels = levels.float()
    if not plain(spec):
        return _in_turns(weight, levels, grid, form, spec, descent_passes, refits)
    rows, (_, count, _), groups = len(weight), levels.shape, grid.scale.shape[1]
    scale, zero = columns.tiles(grid.scale, 1.0), columns.tiles(grid.zero)
    tiled = columns.tiles(weight)
    slopes = form @ _off(tiled, levels, scale, zero)

    def descend_columns(dtype: str | None, descent_passes: int, refits: int) -> None:
        columns.descend_columns(slopes, levels, scale, zero, form, spec.bits, dtype, descent_passes, refits)

    def refit() -> None:
        better = descend_scales(weight, columns.untile(levels, rows), _rows_of(scale, zero, rows), form, spec,
                                refits)
        scale.copy_(columns.tiles(better.scale, 1.0))
        torch.matmul(form, _off(tiled, levels, scale, zero), out=slopes)

    if not refits or count // groups <= columns.LARGEST_GROUP:
        descend_columns(dtype_name(scale_dtype(spec)) if refits else None, descent_passes, refits)
    else:
        refit()
        for _ in range(descent_passes):
            descend_columns(None, 1, 0)
            refit()
    return columns.untile(levels, rows), _rows_of(scale, zero, rows)


def _in_turns(weight: torch.Tensor, levels: torch.Tensor, grid: Grid, form: torch.Tensor, spec: QuantSpec,
              descent_passes: int, refits: int) -> tuple[torch.Tensor, Grid]:
    """Levels by the kernels, then scales by torch, and so on: what scales may be is the spec's business."""
    rows = len(weight)
    for last in [False] * descent_passes + [True]:
        grid = refit_scales(weight, columns.untile(levels, rows), grid, form, spec,
                            refits if last else min(refits, 1))
        if not last:
            off = columns.tiles(weight - from_grid(columns.untile(levels, rows), grid))
            columns.descend_columns(form @ off, levels, columns.tiles(grid.scale, 1.0),
                                    columns.tiles(grid.zero), form, spec.bits, None, 1, 0, rising(spec))
    return columns.untile(levels, rows), grid


def _rows_of(scale: torch.Tensor, zero: torch.Tensor, rows: int) -> Grid:
    return Grid(*(columns.untile(part, rows).contiguous() for part in (scale, zero)))


def _off(tiled: torch.Tensor, levels: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """What the weights are off, ``[tiles, in, 64]``."""
    tile, groups, rows = scale.shape
    values = (levels.view(tile, groups, -1, rows) - zero.unsqueeze(2)).mul_(scale.unsqueeze(2))
    return torch.sub(tiled, values.view(tiled.shape), out=values.view(tiled.shape))
