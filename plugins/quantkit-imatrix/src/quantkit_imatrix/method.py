"""Importance-weighted rounding, the idea of llama.cpp's importance matrix.

https://github.com/ggml-org/llama.cpp/pull/4861. A Linear's output is off by ``Σ_j (w_j − ŵ_j) x_j``; where
inputs are taken as independent, its mean square is ``Σ_j H_jj (w_j − ŵ_j)²`` with ``H`` the Hessian. So each
group's scale and zero point are chosen by that sum instead of by the group's extremes. From several ranges,
weights are rounded and the grid is refitted to them in closed form by weighted least squares. The best grid
that was seen is rounded to and refitted again until it no longer changes.

Each weight goes to its nearest level: unlike GPTQ nothing is factorized, and no column waits for another.
"""

from __future__ import annotations

import torch
from pydantic import Field

from quantkit.formats.base import Codes
from quantkit.formats.spec import QuantSpec
from quantkit.quantization.methods.base import LayerStats, Method, MethodOptions
from quantkit.quantization.methods.grid import (
    Grid,
    at_once,
    check_finite,
    find_grid,
    grid_between,
    round_levels_,
    round_to_grid,
    to_codes,
)
from quantkit.quantization.methods.hessian import UNREACHED, hessian_of
from quantkit.quantization.methods.stored_scales import (
    round_scale,
)

WIDEST = 1.075
"""The first factor on a group's extremes: a symmetric grid has one level less above its zero than below."""


class ImatrixOptions(MethodOptions):
    """Options of ``imatrix``.

    Attributes:
        narrowest: the last factor on a group's extremes that is tried.
        starts: number of factors that are tried.
        refits: largest number of times that the best grid is rounded and refitted.
    """

    narrowest: float = Field(default=0.5, gt=0, lt=WIDEST)
    starts: int = Field(default=24, ge=2, le=1000)
    refits: int = Field(default=8, ge=0, le=1000)


def quantize(weight: torch.Tensor, stats: LayerStats | None, spec: QuantSpec,
             options: MethodOptions) -> Codes:
    """Solve ``weight``, float32 ``[out, in]``, with ``stats.hessian``, float32 ``[in, in]``.

    Raises:
        SpecError: the weight isn't finite, or is beyond the range of the scales' dtype.
        CalibrationError: there is no Hessian, or it isn't finite.
    """
    assert isinstance(options, ImatrixOptions)
    check_finite(weight)
    importance = hessian_of(weight, stats, "imatrix").diagonal().clamp(min=0)
    notes: tuple[str, ...] = ()
    if float(largest := importance.max()) > 0:
        importance = importance / largest
    else:
        importance, notes = torch.ones_like(importance), (f"all inputs count the same: {UNREACHED}",)
    first = find_grid(weight, spec)
    groups = weight.reshape(first.scale.numel(), -1)
    scale, zero = first.scale.reshape(-1, 1), first.zero.reshape(-1, 1)
    parts = []
    step = max(1, at_once(weight.device) // groups.shape[1])
    for start in range(0, len(groups), step):
        part = slice(start, min(start + step, len(groups)))
        search = _Search(groups[part], _costs(importance, groups.shape[1], part), spec,
                         Grid(scale[part], zero[part]))
        parts.append(search.run(options))
    grid = Grid(torch.cat([part.scale for part in parts]).reshape(first.scale.shape),
                torch.cat([part.zero for part in parts]).reshape(first.zero.shape))
    return to_codes(round_to_grid(weight, grid, spec), grid, spec, notes)


def _costs(importance: torch.Tensor, size: int, part: slice) -> torch.Tensor:
    """The importance of each weight of some groups, ``[groups, size]``, or ``[1, size]`` where all have the
    same; a group is some columns of a row, a row, or all rows."""
    if importance.numel() <= size:
        return importance.repeat(size // importance.numel())[None]
    of_a_row = importance.reshape(-1, size)
    numbers = torch.arange(part.start, part.stop, device=importance.device)
    return of_a_row[numbers % len(of_a_row)]


class _Search:
    """The best grid of each group so far, of those that were offered.

    Errors are in units of the first grid's scales, so that weights of any size can be squared.

    Args:
        groups: float32 ``[n, g]``.
        costs: float32 ``[n or 1, g]``, of each weight's squared error.
        spec: a spec of kind ``int``.
        first: the grid that plain rounding has, ``[n, 1]``.
    """

    def __init__(self, groups: torch.Tensor, costs: torch.Tensor, spec: QuantSpec, first: Grid) -> None:
        self._groups, self._costs, self._spec, self._unit = groups, costs, spec, first.scale
        self._scaled = groups / first.scale
        self.grid = first
        self._least = self._error(first, self._levels(first))

    def run(self, options: ImatrixOptions) -> Grid:
        """The best grid from all starts, refitted."""
        low = self._groups.amin(dim=1, keepdim=True).clamp(max=0)
        high = self._groups.amax(dim=1, keepdim=True).clamp(min=0)
        for factor in torch.linspace(WIDEST, options.narrowest, options.starts, dtype=torch.float64).tolist():
            start = grid_between(low * factor, high * factor, self._spec)
            levels = self._levels(start)
            self._offer(start, levels)
            self._offer(self._refitted(start, levels))
        for _ in range(options.refits):
            if not self._offer(self._refitted(self.grid, self._levels(self.grid))):
                break
        return self.grid

    def _offer(self, grid: Grid, levels: torch.Tensor | None = None) -> bool:
        """Take a grid where its error is lower; whether it was anywhere."""
        error = self._error(grid, self._levels(grid) if levels is None else levels)
        better = error < self._least
        self._least = torch.where(better, error, self._least)
        self.grid = Grid(torch.where(better, grid.scale, self.grid.scale),
                         torch.where(better, grid.zero, self.grid.zero))
        return bool(better.any())

    def _levels(self, grid: Grid) -> torch.Tensor:
        return round_levels_(self._groups / grid.scale, grid.zero, self._spec)

    def _error(self, grid: Grid, levels: torch.Tensor) -> torch.Tensor:
        """The weighted squared error ``[n, 1]``."""
        error = ((levels - grid.zero) * (grid.scale / self._unit)).sub_(self._scaled)
        return error.square_().mul_(self._costs).sum(dim=1, keepdim=True)

    def _refitted(self, grid: Grid, levels: torch.Tensor) -> Grid:
        """The grid on which these levels are closest to the weights, its zero a whole one."""
        zero = grid.zero if self._spec.symmetric else self._fitted_zero(grid, levels)
        steps = levels - zero
        weighted = steps * self._costs
        ratio = (weighted * self._scaled).sum(1, keepdim=True) / (weighted * steps).sum(1, keepdim=True)
        scale = ratio * self._unit
        usable = torch.isfinite(scale) & (scale > 0)
        return Grid(torch.where(usable, round_scale(torch.where(usable, scale, grid.scale), zero, self._spec),
                                grid.scale), torch.where(usable, zero, grid.zero))

    def _fitted_zero(self, grid: Grid, levels: torch.Tensor) -> torch.Tensor:
        """Where the line through ``(level, weight)`` crosses 0, rounded to a level."""
        total = self._costs.sum(1, keepdim=True)
        mean_level = (self._costs * levels).sum(1, keepdim=True) / total
        mean_weight = (self._costs * self._scaled).sum(1, keepdim=True) / total
        off = levels - mean_level
        weighted = off * self._costs
        slope = (weighted * (self._scaled - mean_weight)).sum(1, keepdim=True) / (
            weighted * off).sum(1, keepdim=True)
        zero = (mean_level - mean_weight / slope).round().clamp(0, 2**self._spec.bits - 1)
        return torch.where(torch.isfinite(zero) & (slope > 0), zero, grid.zero)


METHOD = Method(name="imatrix", paper="https://github.com/ggml-org/llama.cpp/pull/4861", quantize=quantize,
                needs=frozenset({"hessian"}), options=ImatrixOptions, quick={"starts": 8, "refits": 2})
