"""Coordinate descent on a layer's loss ``tr((W - Q) H (W - Q)ᵀ)``: over levels, and over scales.

Solving column by column leaves no weight where it is best once all others are known. So every weight is
visited again and put on the level that is best with the others as they are, as in QuantEase,
https://arxiv.org/abs/2309.01885; then every group's scale is, codes held fixed. Each step is exact, so the
loss never rises.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quantkit.formats.spec import QuantSpec
from quantkit.quantization.methods.grid import Grid, at_once, from_grid, round_scale, settle_

_FORM = 1 << 24  # values of intermediate results while the scales' quadratic form is made


def descend_levels(weight: torch.Tensor, levels: torch.Tensor, grids: Sequence[Grid], hessian: torch.Tensor,
                   spec: QuantSpec, block: int) -> torch.Tensor:
    """One visit to every weight, column after column; of several Linears, which depend on nothing of each
    other, at once.

    Args:
        weight: float32 ``[linears, out, in]``.
        levels: float32 ``[linears, out, in]``: where to start.
        grids: what each one's levels stand for.
        hessian: float32 ``[linears, in, in]``, its diagonal positive.
        spec: kind and bits.
        block: columns visited before the rest is updated; changes speed, not the result.

    Returns:
        Levels as given.
    """
    work = levels.mT.clone(memory_format=torch.contiguous_format)
    linears, count, out = work.shape
    scales, zeros = by_column(grids, out)
    size = count // scales.shape[1]
    off = torch.stack([w - from_grid(v, grid) for w, v, grid in zip(weight, levels, grids, strict=True)])
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
                settle_(level, zero, spec)
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
    rows, groups, size = units.shape
    result = torch.empty(rows, groups, groups, device=units.device)
    for group, part in enumerate(hessian.split(size)):
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
