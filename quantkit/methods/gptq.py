"""GPTQ: quantize a column, spread its error over the columns that are left, repeat.

https://arxiv.org/abs/2210.17323. Minimises ``tr((W - Q) H (W - Q)ᵀ)`` with ``H`` the mean of ``x xᵀ``
over calibration tokens. Groups are *static*: their grids are fixed before solving, so that
activation order changes only the order of solving and every group keeps its place on disk.

Additions to the paper, on by default. The grids come from a search over shrunken ranges that weighs
each column's error by ``diag(H)``. After solving, coordinate descent on the same loss visits every
group's scale and every weight's level again (:mod:`~quantkit.methods.descent`). A row that plain
rounding serves better is kept rounded, so that the loss on ``H`` is never above that of ``rtn``.
"""

from __future__ import annotations

import torch
from pydantic import Field

from quantkit.formats.base import Codes
from quantkit.methods import trellis
from quantkit.methods.base import LayerStats, Method, Options
from quantkit.methods.descent import descend_levels, descend_scales
from quantkit.methods.grid import (
    SERIAL,
    Grid,
    find_grid,
    from_grid,
    join,
    require_finite,
    round_to_grid,
    row_parts,
    search_factors,
    settle_,
    to_codes,
)
from quantkit.methods.hessian import NO_BETTER, Factors, damped, factorize, hessian_of, losses
from quantkit.spec import QuantSpec

TOGETHER = 1 << 24
"""Weights that are solved at a time: rows don't depend on each other, and each takes working copies."""


class GptqOptions(Options):
    """Options of ``gptq``.

    Attributes:
        damp: added to the Hessian's diagonal, in units of its mean; raised tenfold while the
            Cholesky factorization fails.
        act_order: solve the columns with the largest ``diag(H)`` first.
        block: columns solved before the rest is updated; changes speed, not the result.
        clip_search: choose the groups' ranges by error weighted with ``diag(H)``.
        refit: rounds of refitting the scales after solving, and after each visit to the levels.
        visits: to every level after solving.
    """

    damp: float = Field(default=0.01, gt=0, le=1)
    act_order: bool = True
    block: int = Field(default=128, ge=1)
    clip_search: bool = True
    refit: int = Field(default=3, ge=0, le=20)
    visits: int = Field(default=1, ge=0, le=100)


def quantize(weight: torch.Tensor, stats: LayerStats | None, spec: QuantSpec, options: Options) -> Codes:
    """Solve ``weight`` (float32 ``[out, in]``) under ``stats.hessian`` (float32 ``[in, in]``).

    Falls back to rounding, with a note, when the Hessian is zero or can't be factorized.

    Raises:
        CalibrationError: no Hessian, one of another size, or one that isn't finite.
        SpecError: the weight isn't finite, or is beyond the range of the scales' dtype.
    """
    assert isinstance(options, GptqOptions)
    require_finite(weight)
    hessian = hessian_of(weight, stats)
    factors, notes = factorize(hessian, options.damp, options.act_order)
    if spec.kind == "trellis":
        return trellis.solve(weight, hessian, factors, spec, options.visits, notes)
    plain = find_grid(weight, spec)
    if factors is None:
        return to_codes(round_to_grid(weight, plain, spec), plain, spec, notes)
    grid = plain
    if options.clip_search:
        grid = find_grid(weight, spec, importance=hessian.diagonal(), shrinks=search_factors(spec))
    parts = row_parts(weight, spec, TOGETHER)
    levels = torch.empty_like(weight)
    for part in parts:
        levels[part] = _solve(weight[part], grid.rows(part), factors, spec, options.block)
    damping = factors.damping
    del factors  # as large as what comes now
    form = damped(hessian, damping)
    made, worse = [], []
    for part in parts:
        codes, failed = _settled(weight[part], levels[part], grid.rows(part), plain.rows(part), form, hessian,
                                 spec, options)
        made.append(codes)
        worse.append(failed)
    if all(bool(failed.all()) for failed in worse):
        notes += (NO_BETTER,)
    return join(made, notes)


def _settled(weight: torch.Tensor, levels: torch.Tensor, grid: Grid, plain: Grid, form: torch.Tensor,
             hessian: torch.Tensor, spec: QuantSpec, options: GptqOptions) -> tuple[Codes, torch.Tensor]:
    """Solved rows after coordinate descent on ``form``, the damped Hessian; rounded where they are no better,
    bool ``[out]``."""
    grid = descend_scales(weight, levels, grid, form, spec, options.refit)
    for _ in range(options.visits):
        levels = descend_levels(weight, levels, grid, form, spec, options.block)
        grid = descend_scales(weight, levels, grid, form, spec, options.refit)
    rounded = round_to_grid(weight, plain, spec)
    solved = losses(weight - from_grid(levels, grid), hessian)
    baseline = losses(weight - from_grid(rounded, plain), hessian)
    if spec.granularity.strategy == "tensor":  # one scale for all rows: all or none
        solved, baseline = solved.sum().expand_as(solved), baseline.sum().expand_as(baseline)
    worse = ~(solved <= baseline)  # also where a loss is NaN
    pick = worse.unsqueeze(1)
    rows = pick[:grid.scale.shape[0]]
    best = Grid(torch.where(rows, plain.scale, grid.scale), torch.where(rows, plain.zero, grid.zero))
    return to_codes(torch.where(pick, rounded, levels), best, spec), worse


def _solve(weight: torch.Tensor, grid: Grid, factors: Factors, spec: QuantSpec, block: int) -> torch.Tensor:
    """The levels, float32 ``[out, in]``. Works on the transpose, where a column is contiguous."""
    upper, order = factors.upper, factors.order
    work = weight.T[order].contiguous()
    out, count = work.shape[1], work.shape[0]
    scales = grid.scale.T.expand(-1, out).contiguous()
    zeros = grid.zero.T.expand(-1, out).contiguous()
    group = (order // (count // scales.shape[0])).tolist()
    pivots = upper.diagonal().tolist()
    levels, errors = torch.empty_like(work), torch.empty(block, out, device=work.device)
    inner = max(1, min(block, SERIAL // out))
    for start in range(0, count, block):
        stop = min(start + block, count)
        for first in range(start, stop, inner):
            last = min(first + inner, stop)
            for i in range(first, last):
                scale, zero = scales[group[i]], zeros[group[i]]
                level = settle_(torch.div(work[i], scale, out=levels[i]), zero, spec)
                error = torch.sub(work[i], (level - zero).mul_(scale), out=errors[i - start]).div_(pivots[i])
                if i + 1 < last:
                    work[i + 1:last].addr_(upper[i, i + 1:last], error, alpha=-1)
            spread = upper[first:last, last:stop].T
            work[last:stop].addmm_(spread, errors[first - start:last - start], alpha=-1)
        work[stop:].addmm_(upper[start:stop, stop:].T, errors[:stop - start], alpha=-1)
    solved = torch.empty_like(levels)
    solved[order] = levels
    return solved.T.contiguous()


METHOD = Method(name="gptq", paper="https://arxiv.org/abs/2210.17323", quantize=quantize,
                needs=frozenset({"hessian"}), options=GptqOptions, kinds=frozenset({"int", "fp", "trellis"}),
                quick={"refit": 0, "visits": 0})
