"""Coordinate descent over the scales of groups, for grids whose scales aren't each a number by itself.

With the levels fixed, a layer's loss ``tr((W - Q) H (W - Q)ᵀ)`` is quadratic in a group's scale (and
minimum). The best whole multiples of a superblock's number are looked for around the minimizer, and a
superblock's numbers are moved with their multiples fixed. A step is taken only where it lowers the loss.
"""

from __future__ import annotations

import torch

from quantkit.formats.spec import QuantSpec
from quantkit.quantization.methods.grid import Grid, from_grid
from quantkit.quantization.methods.scale_rounding import rounded_minimum, rounded_multiple, rounded_scale

NEIGHBORS = (-2.0, -1.0, 0.0, 1.0, 2.0)
"""Multiples around the minimizer's that are tried for a scale, each with the minimum that is best with it."""


def refit_scales(weight: torch.Tensor, levels: torch.Tensor, grid: Grid, hessian: torch.Tensor,
                 spec: QuantSpec, rounds: int) -> Grid:
    """``rounds`` visits to every group's scale and minimum, and to every superblock's numbers.

    Args:
        weight, levels: float32 ``[out, in]``.
        grid: where to start, with a scale for each group of a row.
        hessian: float32 ``[in, in]``, its diagonal positive.
        spec: with superblocks or minima, signed scales, or scales of few bits.
        rounds: visits.
    """
    if not rounds:
        return grid
    state = _State(weight, levels, grid, hessian, spec)
    for _ in range(rounds):
        for group in range(grid.scale.shape[1]):
            state.move_group(group)
        if spec.superblock is not None:
            for number in range(weight.shape[1] // spec.superblock):
                state.move_superblock(number)
    return state.grid()


class _State:
    """Slopes ``(W - Q) H``, float32 ``[out, in]``, and the grid, kept up to date."""

    def __init__(self, weight: torch.Tensor, levels: torch.Tensor, grid: Grid, hessian: torch.Tensor,
                 spec: QuantSpec) -> None:
        self._spec, self._hessian, self._zero = spec, hessian, grid.zero
        self._size = weight.shape[1] // grid.scale.shape[1]
        self._units = levels.reshape(*grid.scale.shape, -1) - grid.zero.unsqueeze(-1)
        self._slopes = (weight - from_grid(levels, grid)) @ hessian
        self._scale = grid.scale.clone()
        self._minimum, self._outer, self._depth = (
            None if part is None else part.clone() for part in (grid.minimum, grid.outer, grid.outer_minimum))

    def grid(self) -> Grid:
        """As it is now."""
        return Grid(self._scale, self._zero, self._minimum, self._outer, self._depth)

    def move_group(self, group: int) -> None:
        """Put a group's scale, and its minimum, where the loss is least with all else as it is."""
        columns = slice(group * self._size, (group + 1) * self._size)
        units, slopes = self._units[:, group], self._slopes[:, columns]
        corner = self._hessian[columns, columns]
        spread = units @ corner
        slope, curve = (slopes * units).sum(dim=1), (spread * units).sum(dim=1)
        if self._minimum is None:
            old = self._scale[:, group]
            step = self._stored(old + slope / curve, group) - old
            step = _if_better(step, step * (2 * slope - step * curve))
            self._scale[:, group] += step
            self._moved(columns, step.unsqueeze(1) * units)
            return
        sides = slopes.sum(dim=1), spread.sum(dim=1), corner.sum()
        step, lift = self._pair(group, slope, curve, *sides)
        self._scale[:, group] += step
        self._minimum[:, group] += lift
        self._moved(columns, step.unsqueeze(1) * units + lift.unsqueeze(1))

    def _pair(self, group: int, slope: torch.Tensor, curve: torch.Tensor, push: torch.Tensor,
              mixed: torch.Tensor, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Steps of a group's scale and minimum, ``[out]``."""
        assert self._minimum is not None
        old, below = self._scale[:, group], self._minimum[:, group]
        target = old + (slope * flat - push * mixed) / (curve * flat - mixed.square())
        gain, step, lift = (torch.zeros_like(old) for _ in range(3))
        for neighbor in NEIGHBORS if self._outer is not None else NEIGHBORS[2:3]:
            near = target if self._outer is None else target + neighbor * self._of(self._outer, group)
            change = self._stored(near, group) - old
            rise = self._stored_minimum(below + (push - change * mixed) / flat, group) - below
            won = 2 * (slope * change + push * rise) - (
                curve * change.square() + 2 * mixed * change * rise + flat * rise.square())
            better = won > gain  # never where it is NaN
            gain, step, lift = (torch.where(better, new, kept) for new, kept in (
                (won, gain), (change, step), (rise, lift)))
        return step, lift

    def move_superblock(self, number: int) -> None:
        """Move a superblock's number, or its two, with their multiples as they are."""
        assert self._outer is not None and self._spec.superblock is not None
        width = self._spec.superblock
        columns = slice(number * width, (number + 1) * width)
        groups = slice(columns.start // self._size, columns.stop // self._size)
        old, slopes = self._outer[:, number].clone(), self._slopes[:, columns]
        corner = self._hessian[columns, columns]
        counts = self._scale[:, groups] / old.unsqueeze(1)
        units = (self._units[:, groups] * counts.unsqueeze(-1)).flatten(1)
        spread = units @ corner
        slope, curve = (slopes * units).sum(dim=1), (spread * units).sum(dim=1)
        if self._minimum is None or self._depth is None:
            step = rounded_scale(old + slope / curve, self._spec) - old
            step = _if_better(step, step * (2 * slope - step * curve))
            rise = torch.zeros_like(step)
        else:
            deep = self._depth[:, number].clone()
            depths = (self._minimum[:, groups] / deep.unsqueeze(1)).repeat_interleave(self._size, dim=1)
            flat = ((depths @ corner) * depths).sum(dim=1)
            push, mixed = (slopes * depths).sum(dim=1), (spread * depths).sum(dim=1)
            determinant = curve * flat - mixed.square()
            step = rounded_scale(old + (slope * flat - push * mixed) / determinant, self._spec) - old
            rise = rounded_scale(deep + (push - step * mixed) / flat, self._spec) - deep
            gain = 2 * (slope * step + push * rise) - (
                curve * step.square() + 2 * mixed * step * rise + flat * rise.square())
            usable = (old + step > 0) & (deep + rise > 0)
            gain = torch.where(usable, gain, torch.zeros_like(gain))
            step, rise = _if_better(step, gain), _if_better(rise, gain)
            self._depth[:, number] += rise
            self._minimum[:, groups] = (self._minimum[:, groups] / deep.unsqueeze(1)).round() * self._depth[
                :, number].unsqueeze(1)
            units = units * step.unsqueeze(1) + depths * rise.unsqueeze(1)
        self._outer[:, number] += step
        self._scale[:, groups] = counts.round() * self._outer[:, number].unsqueeze(1)
        self._moved(columns, units if self._depth is not None else units * step.unsqueeze(1))

    def _stored(self, scale: torch.Tensor, group: int) -> torch.Tensor:
        """Scales ``[out]`` of a group as they are stored."""
        if self._spec.superblock is None:
            outer = None if self._outer is None else self._outer.reshape(-1)
            return rounded_scale(scale if self._spec.signed or self._spec.kind == "iq"
                                 else scale.clamp(min=0), self._spec, outer)
        step = self._of(self._outer, group)
        return rounded_multiple(scale / step, self._spec) * step

    def _stored_minimum(self, minimum: torch.Tensor, group: int) -> torch.Tensor:
        if self._spec.superblock is None:
            return rounded_minimum(minimum, self._spec)
        step = self._of(self._depth, group)
        return -rounded_multiple(-minimum / step, self._spec, zero=True) * step

    def _of(self, outer: torch.Tensor | None, group: int) -> torch.Tensor:
        """The number of a group's superblock, ``[out]``."""
        assert outer is not None and self._spec.superblock is not None
        return outer[:, group * self._size // self._spec.superblock]

    def _moved(self, columns: slice, change: torch.Tensor) -> None:
        """These columns' values have changed."""
        self._slopes.addmm_(change, self._hessian[columns], alpha=-1)


def _if_better(step: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """A step where it lowers the loss, by a finite number; else none."""
    return torch.where((gain > 0) & torch.isfinite(step), step, torch.zeros_like(step))
