"""GPTQ on a CPU: our own kernels take all columns of 64 rows at a time (:mod:`quantkit.ops.columns`)."""

from __future__ import annotations

import torch

from quantkit.formats.dtypes import dtype_name, scale_dtype
from quantkit.methods.descent import descend_scales
from quantkit.methods.grid import SHRINKS, Grid
from quantkit.methods.hessian import HessianFactors
from quantkit.ops import columns
from quantkit.spec import QuantSpec


def takes(spec: QuantSpec, device: torch.device) -> bool:
    """Whether the kernels solve this: integers whose scales belong to one row each."""
    return (spec.kind == "int" and spec.granularity.strategy in ("channel", "group")
            and columns.by_kernel(device))


def solve(weight: torch.Tensor, factors: HessianFactors, plain: Grid, spec: QuantSpec,
          costs: torch.Tensor | None, pull: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choose ranges and solve the columns.

    Args:
        weight: float32 ``[rows, in]``.
        factors: of the damped Hessian.
        plain: the grid of plain rounding, used where there is no search.
        spec: which :func:`takes`.
        costs: float32 ``[in]``, of a column's squared error, to search for ranges by; ``None``: no search.
        pull: share of a column's move by earlier errors that is taken back before it is rounded.

    Returns:
        Levels uint8 ``[tiles, in, 64]``; scales and zeros float32 ``[tiles, groups, 64]``.
    """
    size = weight.shape[1] // plain.scale.shape[1]
    tiled = columns.tiles(weight)
    if costs is not None:
        scale, zero = columns.search_ranges(tiled, costs, size, SHRINKS, spec.bits,
                                            spec.symmetric, dtype_name(scale_dtype(spec)))
    else:
        scale, zero = columns.tiles(plain.scale, 1.0), columns.tiles(plain.zero)
    order = factors.order
    tiled = tiled[:, order]
    solved = columns.solve_columns(tiled, factors.upper, scale, zero, order // size, spec.bits,
                                    pull)
    levels = torch.empty_like(solved, dtype=torch.uint8)
    levels[:, order] = solved.to(torch.uint8)
    return levels, scale, zero


def descend(weight: torch.Tensor, levels: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor,
            form: torch.Tensor, spec: QuantSpec, descent_passes: int,
            refits: int) -> tuple[torch.Tensor, Grid]:
    """Coordinate descent on what :func:`solve` has returned.

    Args:
        weight: float32 ``[rows, in]``.
        levels, scale, zero: where to start.
        form: float32 ``[in, in]``, the damped Hessian.
        spec: kind, bits and the scales' dtype.
        descent_passes: passes over the levels, and over the scales.
        refits: passes over the scales after them; 0: scales stay as they are.

    Returns:
        Levels float32 ``[rows, in]`` and their grid.
    """
    rows, (_, count, _), groups = len(weight), levels.shape, scale.shape[1]
    tiled, levels = columns.tiles(weight), levels.float()
    slopes = form @ _off(tiled, levels, scale, zero)

    def descend_columns(dtype: str | None, descent_passes: int, refits: int) -> None:
        columns.descend_columns(slopes, levels, scale, zero, form, spec.bits, dtype, descent_passes, refits)

    def grid() -> Grid:
        return Grid(*(columns.untile(part, rows).contiguous() for part in (scale, zero)))

    def refit() -> None:
        better = descend_scales(weight, columns.untile(levels, rows), grid(), form, spec, refits)
        scale.copy_(columns.tiles(better.scale, 1.0))
        torch.matmul(form, _off(tiled, levels, scale, zero), out=slopes)

    if not refits or count // groups <= columns.LARGEST_GROUP:
        descend_columns(dtype_name(scale_dtype(spec)) if refits else None, descent_passes, refits)
    else:
        refit()
        for _ in range(descent_passes):
            descend_columns(None, 1, 0)
            refit()
    return columns.untile(levels, rows), grid()


def _off(tiled: torch.Tensor, levels: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """What the weights are off, ``[tiles, in, 64]``."""
    tile, groups, rows = scale.shape
    values = (levels.view(tile, groups, -1, rows) - zero.unsqueeze(2)).mul_(scale.unsqueeze(2))
    return torch.sub(tiled, values.view(tiled.shape), out=values.view(tiled.shape))
