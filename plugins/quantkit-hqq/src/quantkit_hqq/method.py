"""Half-Quadratic Quantization, https://mobiusml.github.io/hqq_blog/ (Badri and Shaji, 2023).

Minimizes ``Σ |w - (q - z) s|^p`` with ``p < 1``, under which a few large errors are cheap. The problem
is split by an auxiliary error ``e``: a shrinkage step finds ``e`` for the present grid, and with ``e``
fixed the grid has a closed form. Both alternate while the coupling ``beta`` grows.

The zero point is found as a real number and then rounded to a level, because the integer layouts
that engines load hold nothing else; the scale is then refitted in the same way with the zero fixed.
Errors are measured in levels, so the options mean the same for weights of any size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from pydantic import Field

from quantkit.formats.base import Codes
from quantkit.formats.spec import QuantSpec
from quantkit.quantization.methods.base import LayerStats, Method, MethodOptions
from quantkit.quantization.methods.grid import (
    SERIAL,
    Grid,
    check_finite,
    find_grid,
    round_to_grid,
    to_codes,
    whole_,
)
from quantkit.quantization.methods.stored_scales import (
    round_scale,
)


class HqqOptions(MethodOptions):
    """Options of ``hqq``.

    Attributes:
        lp_norm: the exponent p of the error.
        beta: coupling in the first iteration, in units of a level.
        kappa: the factor of ``beta`` after each iteration.
        iterations: alternations, for the zeros and again for the scales.
    """

    lp_norm: float = Field(default=0.7, gt=0, le=1)
    beta: float = Field(default=10.0, gt=0)
    kappa: float = Field(default=1.01, ge=1)
    iterations: int = Field(default=20, ge=1, le=1000)


def quantize(weight: torch.Tensor, stats: LayerStats | None, spec: QuantSpec,
             options: MethodOptions) -> Codes:
    """Solve ``weight`` (float32 ``[out, in]``); ``stats`` isn't looked at.

    Raises:
        SpecError: the weight isn't finite, or is beyond the range of the scales' dtype.
    """
    assert isinstance(options, HqqOptions)
    check_finite(weight)
    start = find_grid(weight, spec)
    groups = weight.reshape(start.scale.numel(), -1)
    scale, zero = start.scale.reshape(-1, 1), start.zero.reshape(-1, 1)
    step = max(1, SERIAL // groups.shape[1])
    parts = [_solve(groups[i:i + step], Grid(scale[i:i + step], zero[i:i + step]), spec, options)
             for i in range(0, groups.shape[0], step)]
    grid = Grid(torch.cat([part.scale for part in parts]).reshape(start.scale.shape),
                torch.cat([part.zero for part in parts]).reshape(start.zero.shape))
    return to_codes(round_to_grid(weight, grid, spec), grid, spec)


def _solve(groups: torch.Tensor, start: Grid, spec: QuantSpec, options: HqqOptions) -> Grid:
    """``groups [n, g]`` and their first grids ``[n, 1]`` → the best grids seen."""
    best = _Best(groups, start, spec, options.lp_norm)
    if not spec.symmetric:
        def next_zero(grid: Grid, levels: torch.Tensor, error: torch.Tensor) -> Grid:
            zero = (levels - groups / grid.scale + error).mean(dim=1, keepdim=True)
            return Grid(grid.scale, zero.clamp_(0, 2**spec.bits - 1))

        _alternate(groups, start, spec, options, next_zero, lambda grid: best.offer(
            Grid(grid.scale, grid.zero.round())))

    def next_scale(grid: Grid, levels: torch.Tensor, error: torch.Tensor) -> Grid:
        units = levels - grid.zero
        target = groups - error * grid.scale
        scale = (units * target).sum(1, keepdim=True) / units.square().sum(1, keepdim=True)
        usable = torch.isfinite(scale) & (scale > 0)
        return Grid(torch.where(usable, round_scale(scale, grid.zero, spec), grid.scale), grid.zero)

    _alternate(groups, best.grid, spec, options, next_scale, best.offer)
    return best.grid


def _alternate(groups: torch.Tensor, grid: Grid, spec: QuantSpec, options: HqqOptions,
               update: Callable[[Grid, torch.Tensor, torch.Tensor], Grid],
               offer: Callable[[Grid], None]) -> None:
    beta = options.beta
    for _ in range(options.iterations):
        scaled = groups / grid.scale
        levels = whole_((scaled + grid.zero).clamp_(0, 2**spec.bits - 1))
        error = _shrink(scaled - (levels - grid.zero), beta, options.lp_norm)
        grid = update(grid, levels, error)
        offer(grid)
        beta *= options.kappa


def _shrink(error: torch.Tensor, beta: float, lp_norm: float) -> torch.Tensor:
    """The proximal step of the lp norm, by generalized soft thresholding; 0 stays 0."""
    size = error.abs()
    return torch.sign(error) * (size - size.pow(lp_norm - 1) / beta).clamp_(min=0)


class _Best:
    """The grid with the least lp error that each group has been offered."""

    def __init__(self, groups: torch.Tensor, grid: Grid, spec: QuantSpec, lp_norm: float) -> None:
        self._groups, self._spec, self._p = groups, spec, lp_norm
        self.grid, self._least = grid, self._error(grid)

    def offer(self, grid: Grid) -> None:
        error = self._error(grid)
        better = error < self._least
        self._least = torch.where(better, error, self._least)
        self.grid = Grid(torch.where(better, grid.scale, self.grid.scale),
                         torch.where(better, grid.zero, self.grid.zero))

    def _error(self, grid: Grid) -> torch.Tensor:
        levels = round_to_grid(self._groups, grid, self._spec)
        return ((levels - grid.zero) * grid.scale - self._groups).abs().pow(self._p).sum(dim=1, keepdim=True)


METHOD = Method(name="hqq", paper="https://mobiusml.github.io/hqq_blog/", quantize=quantize,
                options=HqqOptions)
