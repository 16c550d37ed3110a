"""GPTQ on a CPU: our own kernels take all columns of 64 rows at a time (:mod:`quantkit.ops.columns`)."""

from __future__ import annotations

import torch

from quantkit.formats.dtypes import dtype_name, scale_dtype
from quantkit.methods.descent import descend_scales
from quantkit.methods.grid import SHRINKS, Grid
from quantkit.methods.hessian import HessianFactors, column_costs, damped
from quantkit.ops import columns
from quantkit.spec import QuantSpec


def takes(spec: QuantSpec, device: torch.device) -> bool:
    """Whether the kernels solve this: integers whose scales belong to one row each."""
    return (spec.kind == "int" and spec.granularity.strategy in ("channel", "group")
            and columns.by_kernel(device))


class TiledSolver:
    """Solves some rows of a weight ``[out, in]``.

    Args:
        hessian: float32 ``[in, in]``.
        factors: of the damped Hessian.
        spec: which :func:`takes`.
    """

    def __init__(self, hessian: torch.Tensor, factors: HessianFactors, spec: QuantSpec) -> None:
        self._form, self._factors, self._spec = damped(hessian, factors.damping), factors, spec
        self._costs, self._dtype = column_costs(factors), dtype_name(scale_dtype(spec))

    def solve(self, weight: torch.Tensor, plain: Grid, clip_search: bool, visits: int,
              refits: int) -> tuple[torch.Tensor, Grid, torch.Tensor]:
        """Some rows.

        Args:
            weight: float32 ``[rows, in]``.
            plain: the grid of plain rounding, used where there is no search.
            clip_search: search for the groups' ranges.
            visits, refits: passes of coordinate descent over levels, and visits to every scale.

        Returns:
            Levels float32 ``[rows, in]``, their grid, and the loss of each row on the damped Hessian,
            float32 ``[rows]``.
        """
        spec, (rows, count) = self._spec, weight.shape
        size = count // plain.scale.shape[1]
        tiled = columns.tiles(weight)
        if clip_search:
            scale, zero = columns.search_ranges(tiled, self._costs, size, SHRINKS, spec.bits,
                                                spec.symmetric, self._dtype)
        else:
            scale, zero = columns.tiles(plain.scale, 1.0), columns.tiles(plain.zero)
        order = self._factors.order
        ordered = columns.solve_columns(tiled[:, order], self._factors.upper, scale, zero, order // size,
                                        spec.bits)
        levels = torch.empty_like(ordered)
        levels[:, order] = ordered
        del ordered
        slopes = self._form @ self._off(tiled, levels, scale, zero)
        if not refits or size <= columns.LARGEST_GROUP:
            columns.descend_columns(slopes, levels, scale, zero, self._form, spec.bits,
                                    self._dtype if refits else None, visits, refits)
        else:
            self._refit(weight, levels, scale, zero, refits)
            for _ in range(visits):
                torch.matmul(self._form, self._off(tiled, levels, scale, zero), out=slopes)
                columns.descend_columns(slopes, levels, scale, zero, self._form, spec.bits, None, 1, 0)
                self._refit(weight, levels, scale, zero, refits)
            torch.matmul(self._form, self._off(tiled, levels, scale, zero), out=slopes)
        loss = (self._off(tiled, levels, scale, zero) * slopes).sum(1).flatten()[:rows]
        return (columns.untile(levels, rows),
                Grid(*(columns.untile(part, rows).contiguous() for part in (scale, zero))), loss)

    def _refit(self, weight: torch.Tensor, levels: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor,
               refits: int) -> None:
        rows = len(weight)
        grid = Grid(columns.untile(scale, rows), columns.untile(zero, rows))
        better = descend_scales(weight, columns.untile(levels, rows), grid, self._form, self._spec, refits)
        scale.copy_(columns.tiles(better.scale, 1.0))

    @staticmethod
    def _off(tiled: torch.Tensor, levels: torch.Tensor, scale: torch.Tensor,
             zero: torch.Tensor) -> torch.Tensor:
        """What the weights are off, ``[tiles, in, 64]``."""
        tile, groups, rows = scale.shape
        values = (levels.view(tile, groups, -1, rows) - zero.unsqueeze(2)).mul_(scale.unsqueeze(2))
        return tiled - values.view(tiled.shape)
