"""Coordinate descent on a layer's loss ``tr((W - Q) H (W - Q)ᵀ)``: over levels, and over scales.

Solving column by column leaves no weight where it is best once all others are known. So every weight is
visited again and put on the level that is best with the others as they are, as in QuantEase,
https://arxiv.org/abs/2309.01885; then every group's scale is, codes held fixed. Each step is exact, so the
loss never rises.

With the levels fixed, the loss is quadratic in a group's scale (and minimum). Where scales are whole
multiples of a superblock's number, the best multiples are looked for around the minimizer, and a superblock's
numbers are moved with their multiples fixed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quantkit.formats.spec import QuantSpec
from quantkit.quantization.methods.grid import (
    Grid,
    at_once,
    from_grid,
    round_levels_,
)
from quantkit.quantization.methods.stored_scales import (
    round_scale,
    rounded_minimum,
    rounded_multiple,
    rounded_scale,
)

_FORM = 1 << 24  # values of intermediate results while the scales' quadratic form is made
NEIGHBORS = (-2.0, -1.0, 0.0, 1.0, 2.0)
"""Multiples around the minimizer's that are tried for a scale, each with the minimum that is best with it."""


def descend_levels(weight: torch.Tensor, levels: torch.Tensor, grids: Sequence[Grid], hessian: torch.Tensor,
                   spec: QuantSpec, block: int) -> torch.Tensor:
    """One visit to every weight, column after column; of several Linears, which depend on nothing of each
    other, at once.

    Args:
        weight: float32 ``[linears, out, in]``.
        levels: float32 ``[linears, out, in]``: where to start.
        grids: the grid of each one.
        hessian: float32 ``[linears, in, in]``, its diagonal positive.
        spec: kind and bits.
        block: columns visited before the rest is updated; changes speed, not the result.

    Returns:
        Levels as given.
    """
    work = levels.mT.clone(memory_format=torch.contiguous_format)
    linears, out = len(work), work.shape[2]
    count = work.shape[1]
    scales, zeros = by_column(grids, out)
    size = count // scales.shape[1]
    off = weight - torch.stack([from_grid(v, grid) for v, grid in zip(levels, grids, strict=True)])
    slopes = hessian @ off.mT
    del off
    pivots = hessian.diagonal(dim1=1, dim2=2).T.unsqueeze(-1).unbind()
    block = min(block, count)
    steps = torch.empty(linears, block, out, device=work.device)
    inner = max(1, min(block, at_once(work.device) // (linears * out)))
    for start in range(0, count, block):
        stop = min(start + block, count)
        for first in range(start, stop, inner):
            last = min(first + inner, stop)
            for i in range(first, last):
                scale, zero = scales[:, i // size], zeros[:, i // size]
                level = torch.div(slopes[:, i], scale * pivots[i]).add_(work[:, i]).sub_(zero)
                round_levels_(level, zero, spec)
                step = torch.sub(level, work[:, i], out=steps[:, i - start]).mul_(scale)
                work[:, i] = level
                if i + 1 < last:
                    slopes[:, i + 1:last].addcmul_(hessian[:, i, i + 1:last, None], step[:, None], value=-1)
            slopes[:, last:stop].baddbmm_(hessian[:, last:stop, first:last],
                                          steps[:, first - start:last - start], alpha=-1)
        slopes[:, stop:].baddbmm_(hessian[:, stop:, start:stop], steps[:, :stop - start], alpha=-1)
    return work.mT.contiguous()


def by_column(grids: Sequence[Grid], out: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zeros of several Linears, float32 ``[linears, groups, out]`` each."""
    scales, zeros = (stacked([part.T.expand(-1, out) for part in parts]).contiguous()
                     for parts in ([grid.scale for grid in grids], [grid.zero for grid in grids]))
    return scales, zeros


def stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One below the other in a new first dimension; a single one is not copied."""
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors))


def descend_scales(weight: torch.Tensor, levels: torch.Tensor, grid: Grid, hessian: torch.Tensor,
                   spec: QuantSpec, rounds: int) -> Grid:
    """``rounds`` visits to every scale: each step is the exact minimizer for its group, rounded to the
    scales' dtype, and taken only where it lowers the loss.

    With the codes fixed the loss is quadratic in a row's scales, so the descent needs only that small
    form: slopes ``[out, groups]`` at the scales it starts from, and curves ``[out, groups, groups]``.
    """
    if not rounds:
        return grid
    rows, cols = weight.shape
    groups = grid.scale.shape[1]
    units = (levels.reshape(rows, groups, -1) - grid.zero.unsqueeze(-1))
    pull = (weight - from_grid(levels, grid)) @ hessian
    slopes = (pull.reshape(units.shape) * units).sum(dim=-1)
    scale, moved = grid.scale.expand(rows, groups).clone(), torch.zeros(rows, groups, device=weight.device)
    step = max(1, _FORM // (cols + groups * groups))
    shared = spec.granularity.strategy == "tensor"
    if shared:
        step = rows
    for start in range(0, rows, step):
        part = slice(start, start + step)
        curves = _curves(units[part], hessian)
        _descend(scale[part], moved[part], slopes[part], curves, grid.zero[part], spec, rounds)
    return Grid(scale[:1] if shared else scale, grid.zero)


def _curves(units: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """``u_g H u_k`` of every row and pair of groups, ``[rows, groups, groups]``."""
    rows, groups = units.shape[:2]
    result = torch.empty(rows, groups, groups, device=units.device)
    for group, part in enumerate(hessian.split(units.shape[2])):
        torch.sum((units[:, group] @ part).view(units.shape).mul_(units), dim=-1, out=result[:, group])
    return result


def _descend(scale: torch.Tensor, moved: torch.Tensor, slopes: torch.Tensor, curves: torch.Tensor,
             zero: torch.Tensor, spec: QuantSpec, rounds: int) -> None:
    """Write better scales into ``scale [rows, groups]``; ``moved`` is how far they went."""
    for _ in range(rounds):
        for g in range(scale.shape[1]):
            slope, curve = slopes[:, g] - (curves[:, g] * moved).sum(dim=1), curves[:, g, g]
            if spec.granularity.strategy == "tensor":
                slope, curve = slope.sum().expand_as(slope), curve.sum().expand_as(curve)
            old = scale[:, g]
            step = round_scale(old + slope / curve, zero[:, g], spec) - old
            step = torch.where((step * (2 * slope - step * curve) > 0) & torch.isfinite(step), step, 0.0)
            scale[:, g] += step
            moved[:, g] += step


def refit_scales(weight: torch.Tensor, levels: torch.Tensor, grid: Grid, hessian: torch.Tensor,
                 spec: QuantSpec, rounds: int) -> Grid:
    """``rounds`` visits to every group's scale and minimum, and to every superblock's numbers.

    Args:
        weight, levels: float32 ``[out, in]``.
        grid: the grid to start from, with a scale for each group of a row.
        hessian: float32 ``[in, in]``, its diagonal positive.
        spec: with superblocks or minima, signed scales, or scales of few bits.
        rounds: the number of visits.
    """
    if not rounds:
        return grid
    state = _ScaleDescent(weight, levels, grid, hessian, spec)
    for _ in range(rounds):
        for group in range(grid.scale.shape[1]):
            state.move_group(group)
        if spec.superblock is not None:
            for number in range(weight.shape[1] // spec.superblock):
                state.move_superblock(number)
    return state.grid()


class _ScaleDescent:
    """Slopes ``(W - Q) H``, float32 ``[out, in]``, and the grid, kept up to date."""

    def __init__(self, weight: torch.Tensor, levels: torch.Tensor, grid: Grid, hessian: torch.Tensor,
                 spec: QuantSpec) -> None:
        self._spec, self._hessian = spec, hessian
        self._zero = grid.zero
        self._size = weight.shape[1] // grid.scale.shape[1]
        self._units = levels.reshape(*grid.scale.shape, -1) - grid.zero.unsqueeze(-1)
        self._slopes = (weight - from_grid(levels, grid)) @ hessian
        self._scale = grid.scale.clone()
        self._minimum = None if grid.minimum is None else grid.minimum.clone()
        self._outer = None if grid.outer is None else grid.outer.clone()
        self._depth = None if grid.outer_minimum is None else grid.outer_minimum.clone()

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
        gain = torch.zeros_like(old)
        step, lift = torch.zeros_like(old), torch.zeros_like(old)
        for neighbor in NEIGHBORS if self._outer is not None else NEIGHBORS[2:3]:
            near = target if self._outer is None else target + neighbor * self._of(self._outer, group)
            change = self._stored(near, group) - old
            rise = self._stored_minimum(below + (push - change * mixed) / flat, group) - below
            won = 2 * (slope * change + push * rise) - (
                curve * change.square() + 2 * mixed * change * rise + flat * rise.square())
            better = won > gain  # never where it is NaN
            gain = torch.where(better, won, gain)
            step, lift = torch.where(better, change, step), torch.where(better, rise, lift)
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
