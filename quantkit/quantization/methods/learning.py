"""Learned rounding: gradient descent by where each weight is, on the loss of where it is rounded to.

AutoRound, https://arxiv.org/abs/2309.05516, learns how each weight is rounded with gradients that rounding
passes on unchanged. Here that starts from levels that are solved already, and a weight's first step is the
share :data:`RATE` of its way to where the loss is least if all others stay. Coordinate descent
(:mod:`~quantkit.quantization.methods.descent`) can't leave a place in which no single weight has a better
level; many small moves at a time can.
"""

from __future__ import annotations

import torch

from quantkit.formats.spec import QuantSpec
from quantkit.quantization.methods.descent import descend_levels
from quantkit.quantization.methods.grid import Grid, from_grid, settle_
from quantkit.quantization.methods.hessian import losses

RATE = 0.1
"""Of the first step; the rate falls linearly to nothing."""
REACH = 1.49
"""Levels that a weight can get away from its start: it is rounded to one of three."""
PASSES = 3
"""Of coordinate descent from where learning ends."""


def learn_levels(weight: torch.Tensor, levels: torch.Tensor, grid: Grid, hessian: torch.Tensor,
                 spec: QuantSpec, steps: int, block: int) -> torch.Tensor:
    """Levels of which no row's loss is above that of the given ones.

    Args:
        weight: float32 ``[out, in]``.
        levels: float32 ``[out, in]``: where to start.
        grid: what they stand for; it stays.
        hessian: float32 ``[in, in]``, its diagonal positive.
        spec: kind ``int``, and bits.
        steps: of gradient descent.
        block: columns visited before the rest is updated; changes speed, not the result.

    Returns:
        Levels as given.
    """
    best, least = levels, losses(weight - from_grid(levels, grid), hessian)

    def keep_better(candidate: torch.Tensor, loss: torch.Tensor) -> None:
        nonlocal best, least
        better = loss < least
        best, least = torch.where(better.unsqueeze(1), candidate, best), torch.where(better, loss, least)

    shape = (*grid.scale.shape, -1)
    scale = grid.scale.unsqueeze(-1)
    reciprocal = (scale * hessian.diagonal().reshape(1, scale.shape[1], -1)).reciprocal_()
    reciprocal.clamp_(max=torch.finfo(torch.float32).max)  # a group of zeros has a scale of almost nothing
    rounded, moved = levels, torch.zeros_like(levels)
    for step in range(steps):
        error = from_grid(rounded, grid).sub_(weight)
        slopes = error @ hessian
        keep_better(rounded, (slopes * error).sum(dim=1))
        move = slopes.view(shape).mul_(reciprocal).view(levels.shape)
        moved.sub_(move, alpha=RATE * (1 - step / steps)).clamp_(-REACH, REACH)
        rounded = _rounded(levels + moved, grid, spec)
    del moved, reciprocal
    for _ in range(PASSES):
        rounded = descend_levels(weight[None], rounded[None], [grid], hessian[None], spec, block)[0]
    keep_better(rounded, losses(weight - from_grid(rounded, grid), hessian))
    return best


def _rounded(latent: torch.Tensor, grid: Grid, spec: QuantSpec) -> torch.Tensor:
    shape, zero = latent.shape, grid.zero.unsqueeze(-1)
    return settle_(latent.view(*grid.scale.shape, -1).sub_(zero), zero, spec).view(shape)
