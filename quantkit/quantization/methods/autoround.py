"""AutoRound: learn which way each weight is rounded, and where each group's range ends, by signed gradients.

https://arxiv.org/abs/2309.05516. A weight is rounded as ``round(w / s + v)`` with ``|v| ≤ ½``, a group's ends
are multiplied by factors of at most 1; rounding passes gradients on unchanged. Every step moves all of
them by the same amount, against the gradient's sign; the amount falls linearly to nothing.

The paper takes the loss of a block's output on samples; here it is the same Hessian's that ``gptq`` solves,
``tr((W - Q) H (W - Q)ᵀ)``: of all samples in every step. Rows don't depend on each other, so each keeps its
best step; the first one is ``rtn``. What :mod:`~quantkit.quantization.methods.descent` finds after that is
kept too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import Field

from quantkit.formats.base import Codes
from quantkit.formats.spec import QuantSpec
from quantkit.quantization.methods.base import LayerStats, Method, MethodOptions, row_parts
from quantkit.quantization.methods.descent import descend_levels, descend_scales
from quantkit.quantization.methods.grid import (
    Grid,
    check_finite,
    grid_between,
    round_levels_,
    to_codes,
)
from quantkit.quantization.methods.hessian import UNREACHED, hessian_of

TOGETHER = 1 << 23
"""Weights that are learned at a time: each takes a dozen working copies."""
NARROWEST = 0.5
"""Times a group's extremes: the least that is left of its range."""


class AutoRoundOptions(MethodOptions):
    """Options of ``autoround``.

    Attributes:
        steps: the steps of signed gradient descent.
        rate: how far the first step moves; by default ``1 / steps``.
        clip: learn the ends of the groups' ranges too.
        descent_passes: passes of coordinate descent over all levels after learning, each followed by a refit
            of the scales, as in ``gptq``.
        block: columns visited before the rest is updated; changes speed, not the result.
    """

    steps: int = Field(default=200, ge=1, le=10000)
    rate: float | None = Field(default=None, gt=0, le=1)
    clip: bool = True
    descent_passes: int = Field(default=1, ge=0, le=100)
    block: int = Field(default=128, ge=1)


@dataclass
class _Best:
    """The smallest loss of every row so far, and its parameters."""

    loss: torch.Tensor
    levels: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor

    def take(self, loss: torch.Tensor, levels: torch.Tensor, grid: Grid) -> None:
        better = loss < self.loss
        pick = better.unsqueeze(1)
        self.loss = torch.where(better, loss, self.loss)
        self.levels = torch.where(pick, levels, self.levels)
        self.scale = torch.where(pick, grid.scale, self.scale)
        self.zero = torch.where(pick, grid.zero, self.zero)


def quantize(weight: torch.Tensor, stats: LayerStats | None, spec: QuantSpec,
             options: MethodOptions) -> Codes:
    """Learn ``weight`` (float32 ``[out, in]``) under ``stats.hessian`` (float32 ``[in, in]``).

    Raises:
        CalibrationError: no Hessian, one of another size, or one that isn't finite.
        SpecError: the weight isn't finite, or is beyond the range of the scales' dtype.
    """
    assert isinstance(options, AutoRoundOptions)
    check_finite(weight)
    hessian = hessian_of(weight, stats, "autoround")
    reached = bool((hessian.diagonal() > 0).any())
    damped = hessian.clone()  # a pivot of 0 has no best level
    damped.diagonal().add_(0.01 * hessian.diagonal().mean())
    results = []
    for part in row_parts(weight, spec, TOGETHER):
        rows = weight[part]
        best = _learn(rows, hessian, spec, options)
        if reached and options.descent_passes:
            _visit(best, rows, hessian, damped, spec, options)
        results.append(to_codes(best.levels, Grid(best.scale, best.zero), spec))
    return Codes.joined(
        results, () if reached else (f"rounded to nearest in place of autoround: {UNREACHED}",))


def _visit(best: _Best, weight: torch.Tensor, hessian: torch.Tensor, damped: torch.Tensor, spec: QuantSpec,
           options: AutoRoundOptions) -> None:
    levels, grid = best.levels, Grid(best.scale, best.zero)
    for _ in range(options.descent_passes):
        levels = descend_levels(weight[None], levels[None], [grid], damped[None], spec, options.block)[0]
        grid = descend_scales(weight, levels, grid, damped, spec, 3)
    best.take(_loss(weight, levels, grid, hessian)[0], levels, grid)


def _learn(weight: torch.Tensor, hessian: torch.Tensor, spec: QuantSpec, options: AutoRoundOptions) -> _Best:
    shape, top = spec.scale_shape((weight.shape[0], weight.shape[1])), 2**spec.bits - 1
    groups = weight.reshape(*shape, -1)
    low, high = (end.unsqueeze(-1) for end in (groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)))
    shift = torch.zeros_like(groups)
    ends = torch.ones(2, *low.shape, device=weight.device)
    rate, best = options.rate or 1 / options.steps, None
    for step in range(options.steps + 1):
        grid = grid_between(low * ends[0], high * ends[1], spec)
        scaled = groups / grid.scale
        raw = scaled + shift
        levels = round_levels_(raw.clone(), grid.zero, spec)
        flat = Grid(grid.scale.reshape(shape), grid.zero.reshape(shape))
        loss, pull = _loss(weight, levels.reshape(weight.shape), flat, hessian)
        if best is None:
            best = _Best(loss, levels.reshape(weight.shape), flat.scale, flat.zero)
        best.take(loss, levels.reshape(weight.shape), flat)
        pull = pull.reshape(groups.shape)
        place = raw + grid.zero
        inside = (place > -0.5) & (place < top + 0.5)
        move = rate * (1 - step / options.steps)
        if options.clip:
            slopes = _end_slopes(pull, levels - grid.zero, scaled, inside, place, spec)
            ends = (ends - move * slopes.sign()).clamp_(NARROWEST, 1.0)
        shift = shift.sub_(move * (pull * inside).sign()).clamp_(-0.5, 0.5)
    assert best is not None
    return best


def _end_slopes(pull: torch.Tensor, units: torch.Tensor, scaled: torch.Tensor, inside: torch.Tensor,
                place: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """How much the loss rises as the range's two ends move outwards, ``[2, out, groups, 1]`` (symmetric:
    ``[1, …]``, both as one), but for a positive factor.

    Args:
        pull: the slope of the loss by the quantized weights ``[out, groups, size]``.
        units, scaled: quantized weights and weights over their scales.
        inside, place: whether a weight has a level of its own, and where that is or would be.
        spec: says whether both ends move as one.
    """
    by_scale = (pull * (units - scaled * inside))
    if spec.symmetric:
        return by_scale.sum(-1, keepdim=True).unsqueeze(0)
    within = (by_scale * inside).sum(-1, keepdim=True) / (2**spec.bits - 1)
    # a clipped weight is at an end of the range, and moves with it
    above, below = ((pull * (~inside & side)).sum(-1, keepdim=True) for side in (place > 0, place <= 0))
    return torch.stack((within - below, within + above))


def _loss(weight: torch.Tensor, levels: torch.Tensor, grid: Grid,
          hessian: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every row's ``eᵀ H e``, and its slope by the quantized weights (halved)."""
    groups = levels.reshape(*grid.scale.shape, -1) - grid.zero.unsqueeze(-1)
    error = (groups * grid.scale.unsqueeze(-1)).reshape(weight.shape) - weight
    pull = error @ hessian
    return (pull * error).sum(1), pull


def _check(spec: QuantSpec) -> str | None:
    return "autoround learns row by row: it can't make one scale for all" if (
        spec.granularity.strategy == "tensor") else None


METHOD = Method(name="autoround", paper="https://arxiv.org/abs/2309.05516", quantize=quantize,
                needs=frozenset({"hessian"}), options=AutoRoundOptions, check=_check)
