"""GPTQ: quantize a column, spread its error over the columns that are left, repeat.

https://arxiv.org/abs/2210.17323. Minimises ``tr((W - Q) H (W - Q)ᵀ)`` with ``H`` the mean of ``x xᵀ``
over calibration tokens. Groups are *static*: their grids are fixed before solving, so that
activation order changes only the order of solving and every group keeps its place on disk.

Two additions to the paper, both on by default. The grids come from a search over shrunken ranges
that weighs each column's error by ``diag(H)``. After solving, each group's scale is refitted by exact
coordinate descent on the same loss, codes held fixed. A row that plain rounding serves better is
kept rounded, so that the loss on ``H`` is never above that of ``rtn``.
"""

from __future__ import annotations

import torch
from pydantic import Field

from quantkit.errors import CalibrationError
from quantkit.formats.base import Codes
from quantkit.methods.base import LayerStats, Method, Options
from quantkit.methods.grid import (
    SHRINKS,
    Grid,
    find_grid,
    from_grid,
    require_finite,
    round_scale,
    round_to_grid,
    to_codes,
)
from quantkit.spec import QuantSpec

MOST_DAMPING = 10.0
"""Times the Hessian's mean diagonal: beyond it the Hessian no longer decides anything."""


class GptqOptions(Options):
    """Options of ``gptq``.

    Attributes:
        damp: added to the Hessian's diagonal, in units of its mean; raised tenfold while the
            Cholesky factorization fails.
        act_order: solve the columns with the largest ``diag(H)`` first.
        block: columns solved before the rest is updated; changes speed, not the result.
        clip_search: choose the groups' ranges by error weighted with ``diag(H)``.
        refit: rounds of refitting the scales after solving.
    """

    damp: float = Field(default=0.01, gt=0, le=1)
    act_order: bool = True
    block: int = Field(default=128, ge=1)
    clip_search: bool = True
    refit: int = Field(default=3, ge=0, le=20)


def quantize(weight: torch.Tensor, stats: LayerStats | None, spec: QuantSpec, options: Options) -> Codes:
    """Solve ``weight`` (float32 ``[out, in]``) under ``stats.hessian`` (float32 ``[in, in]``).

    Falls back to rounding, with a note, when the Hessian is zero or can't be factorized.

    Raises:
        CalibrationError: no Hessian, one of another size, or one that isn't finite.
        SpecError: the weight isn't finite, or is beyond the range of the scales' dtype.
    """
    assert isinstance(options, GptqOptions)
    require_finite(weight)
    hessian = _hessian(weight, stats)
    plain = find_grid(weight, spec)
    rounded = round_to_grid(weight, plain, spec)
    damped, upper, order, notes = _factorize(hessian, options)
    if upper is None:
        return to_codes(rounded, plain, spec, notes)
    grid = plain
    if options.clip_search:
        grid = find_grid(weight, spec, importance=hessian.diagonal(), shrinks=SHRINKS)
    levels = _solve(weight, grid, upper, order, spec, options.block)
    grid = _refit(weight, levels, grid, damped, spec, options.refit)
    solved = _loss(weight - from_grid(levels, grid), hessian)
    baseline = _loss(weight - from_grid(rounded, plain), hessian)
    if spec.granularity.strategy == "tensor":  # one scale for all rows: all or none
        solved, baseline = solved.sum().expand_as(solved), baseline.sum().expand_as(baseline)
    worse = ~(solved <= baseline)  # also where a loss is NaN
    if bool(worse.all()):
        notes += ("rounded to nearest in place of gptq: its loss on the calibration text was no lower",)
    pick = worse.unsqueeze(1)
    rows = pick[:grid.scale.shape[0]]
    best = Grid(torch.where(rows, plain.scale, grid.scale), torch.where(rows, plain.zero, grid.zero))
    return to_codes(torch.where(pick, rounded, levels), best, spec, notes)


def _hessian(weight: torch.Tensor, stats: LayerStats | None) -> torch.Tensor:
    if stats is None or stats.hessian is None:
        raise CalibrationError("gptq was given no Hessian", why="it needs calibration text",
                               next="add a calibration section to the recipe, or use method rtn")
    cols = weight.shape[1]
    if tuple(stats.hessian.shape) != (cols, cols):
        raise CalibrationError(f"the Hessian is {list(stats.hessian.shape)}, the layer has {cols} inputs")
    if not bool(torch.isfinite(stats.hessian).all()):
        raise CalibrationError(f"the Hessian of {stats.tokens} tokens holds NaN or infinity",
                               why="an activation overflowed while calibrating",
                               next="use another calibration text, or dtype float32")
    return stats.hessian


def _factorize(hessian: torch.Tensor, options: GptqOptions) -> tuple[
        torch.Tensor, torch.Tensor | None, torch.Tensor, tuple[str, ...]]:
    """→ damped Hessian; upper ``U`` with ``H⁻¹ = Uᵀ U`` in solving order, ``None`` if hopeless; that
    order; notes."""
    diagonal = hessian.diagonal()
    order = torch.arange(diagonal.numel(), device=hessian.device)
    if options.act_order:
        order = torch.argsort(diagonal, descending=True, stable=True)
    mean = float(diagonal.mean())
    if not mean > 0:
        return hessian, None, order, ("rounded to nearest in place of gptq: no calibration input reached it",)
    damp, notes = options.damp, tuple[str, ...]()
    while damp <= MOST_DAMPING:
        damped = hessian.clone()
        damped.diagonal().add_(damp * mean)
        # with the order reversed, the lower factor is the upper factor of H itself: one
        # factorization and one triangular inverse, where factorizing the inverse takes three
        backwards = order.flip(0)
        lower, failed = torch.linalg.cholesky_ex(damped[backwards][:, backwards])
        if not int(failed) and bool(torch.isfinite(lower).all()):
            eye = torch.eye(diagonal.numel(), dtype=hessian.dtype, device=hessian.device)
            upper = torch.linalg.solve_triangular(lower.flip(0, 1), eye, upper=True)
            return damped, upper, order, notes
        damp *= 10
        notes = (f"damping raised from {options.damp:g} to {damp:g}: the Hessian is not positive definite",)
    return hessian, None, order, ("rounded to nearest in place of gptq: the Hessian is not positive "
                                  f"definite at damping {damp / 10:g}",)


def _solve(weight: torch.Tensor, grid: Grid, upper: torch.Tensor, order: torch.Tensor, spec: QuantSpec,
           block: int) -> torch.Tensor:
    """The levels, float32 ``[out, in]``. Works on the transpose, where a column is contiguous."""
    work = weight.T[order].contiguous()
    out, count, top = work.shape[1], work.shape[0], 2**spec.bits - 1
    scales = grid.scale.T.expand(-1, out).contiguous()
    zeros = grid.zero.T.expand(-1, out).contiguous()
    group = (order // (count // scales.shape[0])).tolist()
    pivots = upper.diagonal().tolist()
    levels = torch.empty_like(work)
    for start in range(0, count, block):
        stop = min(start + block, count)
        errors = torch.empty(stop - start, out, device=work.device)
        for i in range(start, stop):
            scale, zero = scales[group[i]], zeros[group[i]]
            level = torch.div(work[i], scale, out=levels[i]).round_().add_(zero).clamp_(0, top)
            error = torch.sub(work[i], (level - zero).mul_(scale), out=errors[i - start]).div_(pivots[i])
            if i + 1 < stop:
                work[i + 1:stop].addr_(upper[i, i + 1:stop], error, alpha=-1)
        work[stop:].addmm_(upper[start:stop, stop:].T, errors, alpha=-1)
    solved = torch.empty_like(levels)
    solved[order] = levels
    return solved.T.contiguous()


def _refit(weight: torch.Tensor, levels: torch.Tensor, grid: Grid, hessian: torch.Tensor, spec: QuantSpec,
           rounds: int) -> Grid:
    """Coordinate descent on the scales: each step is the exact minimiser for its group, rounded to
    the scales' dtype, and taken only where it lowers the loss."""
    if not rounds:
        return grid
    scale, shared = grid.scale.clone(), spec.granularity.strategy == "tensor"
    groups = scale.shape[1]
    size = weight.shape[1] // groups
    units = levels - grid.zero.repeat_interleave(size, dim=1)
    pull = (weight - from_grid(levels, grid)) @ hessian  # half the loss's slope, kept current
    for _ in range(rounds):
        for g in range(groups):
            cols = slice(g * size, (g + 1) * size)
            unit = units[:, cols]
            slope = (pull[:, cols] * unit).sum(dim=1, keepdim=True)
            curve = ((unit @ hessian[cols, cols]) * unit).sum(dim=1, keepdim=True)
            if shared:
                slope, curve = slope.sum(0, keepdim=True), curve.sum(0, keepdim=True)
            old = scale[:, g:g + 1]
            new = round_scale(old + slope / curve, grid.zero[:, g:g + 1], spec)
            step = new - old
            gain = step * (2 * slope - step * curve)
            step = torch.where((curve > 0) & (gain > 0) & torch.isfinite(new), step, 0.0)
            scale[:, g:g + 1] += step
            pull -= (unit * step) @ hessian[cols]
    return Grid(scale, grid.zero)


def _loss(error: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """``eᵀ H e`` of every row, float32 ``[out]``."""
    return ((error @ hessian) * error).sum(dim=1)


METHOD = Method(name="gptq", paper="https://arxiv.org/abs/2210.17323", quantize=quantize,
                needs=frozenset({"hessian"}), options=GptqOptions)
