"""GPTQ: quantize a column, spread its error over the columns that are left, repeat.

https://arxiv.org/abs/2210.17323. Minimizes ``tr((W - Q) H (W - Q)ᵀ)`` with ``H`` the mean of ``x xᵀ``
over calibration tokens. Groups are *static*: their grids are fixed before solving, so that
activation order changes only the order of solving and every group keeps its place on disk.

Additions to the paper, on by default. The grids come from a search over shrunken and stretched ranges that
weighs each column's error by what it costs once the other columns have made up for it. After solving,
coordinate descent on the same loss visits every group's scale and every weight's level again
(:mod:`~quantkit.quantization.methods.descent`). A row that plain rounding serves better is kept rounded, so
that the loss on ``H`` is never above that of ``rtn`` of the same weights. What is solved for, and rounded,
aren't the model's weights, but those that make up for half of what earlier layers' errors have done to the
inputs (GPTAQ, https://arxiv.org/abs/2504.02692); a row's error in the manifest contains that.

Off by default: part of what earlier columns' errors have moved a column can be taken back before it is
rounded (FOEM, https://arxiv.org/abs/2507.11017), and rounding can be learned on from the result
(:mod:`~quantkit.quantization.methods.learning`).

On a CPU the loops over columns are kernels (:mod:`~quantkit.quantization.methods.gptq_tiles`), on a GPU the
inner one is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pydantic import Field

from quantkit.formats.base import Codes
from quantkit.formats.spec import QuantSpec
from quantkit.memory.quantize import TOGETHER
from quantkit.ops import columns, gpu
from quantkit.quantization.methods import gptq_tiles, trellis
from quantkit.quantization.methods.base import LayerStats, Method, MethodOptions
from quantkit.quantization.methods.descent import by_column, descend_levels, descend_scales, stacked
from quantkit.quantization.methods.grid import (
    Grid,
    above_minima,
    at_once,
    from_grid,
    join,
    require_finite,
    round_to_grid,
    row_parts,
    settle_,
    to_codes,
)
from quantkit.quantization.methods.group_scales import GRIDS, choose_grid
from quantkit.quantization.methods.hessian import (
    NO_BETTER,
    HessianFactors,
    column_costs,
    damped,
    factorize,
    hessian_of,
    losses,
    undrifted,
)
from quantkit.quantization.methods.learning import learn_levels
from quantkit.quantization.methods.refit import refit_scales
from quantkit.quantization.methods.tiles import sums_of_tiles


class GptqOptions(MethodOptions):
    """Options of ``gptq``.

    Attributes:
        damp: added to the Hessian's diagonal, in units of its mean; raised tenfold while the
            Cholesky factorization fails.
        act_order: solve the columns with the largest ``diag(H)`` first.
        block: columns solved before the rest is updated, where our CPU kernels don't choose it; changes
            speed, not the result.
        clip_search: choose the groups' ranges by squared error, weighed by ``1 / diag(H⁻¹)``.
        refit: rounds of refitting the scales after solving, and after each descent pass. Our CPU kernels
            refit a group's scale in each pass, before its levels, and do these rounds at the end.
        descent_passes: passes of coordinate descent over all levels after solving.
        drift: share of the inputs' drift from the original model's that the weights make up for.
        first_order: share of a column's move by earlier errors that is taken back before it is rounded.
        learning_steps: of learned rounding after descent (:mod:`~quantkit.quantization.methods.learning`), of
        integers
            whose scales belong to one row each.
    """

    damp: float = Field(default=0.05, gt=0, le=1)
    act_order: bool = True
    block: int = Field(default=128, ge=1)
    clip_search: bool = True
    refit: int = Field(default=3, ge=0, le=20)
    descent_passes: int = Field(default=3, ge=0, le=100)
    drift: float = Field(default=0.5, ge=0, le=1)
    first_order: float = Field(default=0, ge=0, le=1)
    learning_steps: int = Field(default=0, ge=0, le=10000)


def quantize(weight: torch.Tensor, stats: LayerStats | None, spec: QuantSpec,
             options: MethodOptions) -> Codes:
    """Solve ``weight`` (float32 ``[out, in]``) under ``stats.hessian`` (float32 ``[in, in]``).

    Falls back to rounding, with a note, when the Hessian is zero or can't be factorized.

    Raises:
        CalibrationError: no Hessian, one of another size, or one that isn't finite.
        SpecError: the weight isn't finite, or is beyond the range of the scales' dtype.
    """
    return together([weight], [stats], spec, options)[0]


def together(weights: Sequence[torch.Tensor], stats: Sequence[LayerStats | None], spec: QuantSpec,
             options: MethodOptions) -> list[Codes]:
    """The same for several weights of one shape. A column of all of them is solved at a time: of small
    ones that is hardly more work than one.

    Raises:
        CalibrationError, SpecError: as :func:`quantize`.
    """
    assert isinstance(options, GptqOptions)
    begun, results = [], {}
    factored: dict[int, tuple[HessianFactors | None, tuple[str, ...]]] = {}
    for number, (weight, known) in enumerate(zip(weights, stats, strict=True)):
        require_finite(weight)
        hessian = hessian_of(weight, known)
        if id(known) in factored:
            factors, notes = factored.pop(id(known))
        else:
            factors, notes = factorize(hessian, options.damp, options.act_order)
        if any(other is known for other in stats[number + 1:]):  # Linears with the same input
            factored[id(known)] = factors, notes
        if factors is not None and known is not None and known.drift is not None and options.drift:
            weight = undrifted(weight, known.drift, factors, options.drift)
            require_finite(weight)
        if spec.kind == "trellis":
            results[number] = trellis.solve(weight, hessian, factors, spec, options.descent_passes, notes)
            continue
        plain = choose_grid(weight, spec)
        if factors is None:
            results[number] = to_codes(round_to_grid(weight, plain, spec), plain, spec, notes)
            continue
        tiled = gptq_tiles.takes(spec, weight.device)
        grid = plain if tiled or not options.clip_search else choose_grid(
            weight, spec, importance=column_costs(factors), search=True, outer=plain.outer)
        task = _Begun(number, weight, hessian, factors, plain, grid, notes)
        del factors  # as large as the Hessian
        if tiled:
            results[number] = _tiled(task, spec, options)
        else:
            begun.append(task)
    if begun:
        numbers = [task.number for task in begun]
        results |= zip(numbers, _solved(begun, spec, options), strict=True)
    return [results[number] for number in range(len(weights))]


def _tiled(task: _Begun, spec: QuantSpec, options: GptqOptions) -> Codes:
    weight, codes, failed = task.weight, list[Codes](), True
    parts = row_parts(weight, spec, TOGETHER, columns.ROWS)
    assert task.factors is not None
    costs = column_costs(task.factors) if options.clip_search else None
    begun = [gptq_tiles.solve(weight[part], task.factors, task.plain.rows(part), spec, costs,
                                options.first_order)
             for part in parts]
    damping, task.factors = task.factors.damping, None  # as large as what comes now
    form = damped(task.hessian, damping)
    for part in parts:
        levels, grid = gptq_tiles.descend(weight[part], *begun.pop(0), form, spec, options.descent_passes,
                                          options.refit)
        levels = _learned(weight[part], levels, grid, form, spec, options)
        better, worse = _unless_rounded(task, levels, grid, part, spec)
        codes.append(better)
        failed &= bool(worse.all())
    return join(codes, task.notes + (NO_BETTER,) * failed)


@dataclass
class _Begun:
    """A weight that is to be solved: its grid, and that of plain rounding."""

    number: int
    weight: torch.Tensor
    hessian: torch.Tensor
    factors: HessianFactors | None
    plain: Grid
    grid: Grid
    notes: tuple[str, ...]


def _solved(begun: Sequence[_Begun], spec: QuantSpec, options: GptqOptions) -> list[Codes]:
    parts = row_parts(begun[0].weight, spec, TOGETHER // len(begun))
    levels = [torch.empty_like(task.weight) for task in begun]
    factors = [task.factors for task in begun if task.factors]
    upper, order = stacked([factor.upper for factor in factors]), torch.stack([factor.order
                                                                               for factor in factors])
    for part in parts:
        grids = [task.grid.rows(part) for task in begun]
        weights = [above_minima(task.weight[part], grid) for task, grid in zip(begun, grids, strict=True)]
        solved = _solve(weights, grids, upper, order, spec, options)
        for mine, result in zip(levels, solved, strict=True):
            mine[part] = result
    damping = [factor.damping for factor in factors]
    for task in begun:
        task.factors = None
    del upper, factors  # as large as what comes now
    form = stacked([damped(task.hessian, mine) for task, mine in zip(begun, damping, strict=True)])
    codes_of_tasks: list[list[Codes]] = [[] for _ in begun]
    failed: list[list[torch.Tensor]] = [[] for _ in begun]
    for part in parts:
        grids = _settled(begun, levels, part, form, spec, options)
        for task, mine, grid, codes, worse in zip(begun, levels, grids, codes_of_tasks, failed, strict=True):
            better, rounded = _unless_rounded(task, mine[part], grid, part, spec)
            codes.append(better)
            worse.append(rounded)
    return [join(codes, task.notes + (NO_BETTER,) * all(bool(part.all()) for part in worse))
            for task, codes, worse in zip(begun, codes_of_tasks, failed, strict=True)]


def _settled(begun: Sequence[_Begun], levels: Sequence[torch.Tensor], part: slice, form: torch.Tensor,
             spec: QuantSpec, options: GptqOptions) -> list[Grid]:
    """Coordinate descent on ``form``, the damped Hessians; writes these rows' levels."""
    def refitted() -> list[Grid]:
        return [refit(task.weight[part], mine[part], grid, hessian, spec, options.refit)
                for task, mine, grid, hessian in zip(begun, levels, grids, form, strict=True)]

    if spec.grid == "fp tiles":  # their scales stay as the search has found them
        options = options.model_copy(update={"refit": 0})
    refit = descend_scales if gptq_tiles.plain(spec) or spec.grid == "fp" else refit_scales
    grids = [task.grid.rows(part) for task in begun]
    grids = refitted()
    for _ in range(options.descent_passes):
        visited = descend_levels(stacked([task.weight[part] for task in begun]),
                                 stacked([mine[part] for mine in levels]), grids, form, spec, options.block)
        for mine, result in zip(levels, visited, strict=True):
            mine[part] = result
        grids = refitted()
    for task, mine, grid, hessian in zip(begun, levels, grids, form, strict=True):
        mine[part] = _learned(task.weight[part], mine[part], grid, hessian, spec, options)
    return grids


def _learned(weight: torch.Tensor, levels: torch.Tensor, grid: Grid, form: torch.Tensor, spec: QuantSpec,
             options: GptqOptions) -> torch.Tensor:
    if not options.learning_steps or not gptq_tiles.plain(spec) or spec.granularity.strategy == "tensor":
        return levels
    return learn_levels(weight, levels, grid, form, spec, options.learning_steps, options.block)


def _unless_rounded(task: _Begun, levels: torch.Tensor, grid: Grid, part: slice,
                    spec: QuantSpec) -> tuple[Codes, torch.Tensor]:
    """Solved rows; rounded where that is no worse, bool ``[out]``."""
    weight, plain, hessian = task.weight[part], task.plain.rows(part), task.hessian
    rounded = round_to_grid(weight, plain, spec)
    solved = losses(weight - from_grid(levels, grid), hessian)
    baseline = losses(weight - from_grid(rounded, plain), hessian)
    if spec.granularity.strategy == "tensor":  # one scale for all rows: all or none
        solved, baseline = solved.sum().expand_as(solved), baseline.sum().expand_as(baseline)
    elif spec.granularity.strategy == "tile":  # the same for the rows of a square
        solved, baseline = (sums_of_tiles(each, spec.granularity.size or 1) for each in (solved, baseline))
    worse = ~(solved <= baseline)  # also where a loss is NaN
    best = plain.where(worse, grid)
    return to_codes(torch.where(worse.unsqueeze(1), rounded, levels), best, spec), worse


def _solve(weights: Sequence[torch.Tensor], grids: Sequence[Grid], upper: torch.Tensor, order: torch.Tensor,
           spec: QuantSpec, options: GptqOptions) -> torch.Tensor:
    """The levels, float32 ``[linears, out, in]``. Works on the transpose, where a column is contiguous."""
    work = torch.stack([weight.T[mine] for weight, mine in zip(weights, order, strict=True)])
    block, pull = options.block, options.first_order
    exact = work.clone() if pull else work
    linears, count, out = work.shape
    scales, zeros = by_column(grids, out)
    groups = order // (count // scales.shape[1])
    fused = spec.kind == "int" and gpu.unavailable(work.device.type, work.dtype) is None
    if fused:
        from quantkit_kernels.triton.gptq import LONGEST, solve_block

        block = min(block, LONGEST)
    levels = torch.empty_like(work)
    errors = torch.empty(linears, min(block, count), out, device=work.device)
    for start in range(0, count, block):
        stop = min(start + block, count)
        columns = slice(start, stop)
        corner, block_errors = upper[:, columns, columns], errors[:, :stop - start]
        if fused:
            solve_block(work[:, columns], exact[:, columns], corner, scales, zeros, groups[:, columns],
                        spec.bits, pull, levels[:, columns], block_errors)
        else:
            _solve_block(work[:, columns], exact[:, columns], corner, scales, zeros, groups[:, columns], spec,
                         pull, levels[:, columns], block_errors)
        work[:, stop:].baddbmm_(upper[:, columns, stop:].mT, block_errors, alpha=-1)
    solved = torch.empty_like(levels)
    for mine, levels_of_task, solution in zip(order, levels, solved, strict=True):
        solution[mine] = levels_of_task
    return solved.mT.contiguous()


def _solve_block(work: torch.Tensor, exact: torch.Tensor, upper: torch.Tensor, scales: torch.Tensor,
                 zeros: torch.Tensor, places: torch.Tensor, spec: QuantSpec, pull: float,
                 levels: torch.Tensor, errors: torch.Tensor) -> None:
    """Some columns: writes ``levels`` and ``errors``, ``[linears, columns, out]``; uses ``work`` up."""
    linears, count, out = work.shape
    lines: slice | torch.Tensor = torch.arange(linears, device=work.device)
    groups: Sequence[int | torch.Tensor] = places.T.unbind()
    if linears == 1:  # spares copies
        lines, groups = slice(None), places[0].tolist()
    pivots = upper.diagonal(dim1=1, dim2=2).T.unsqueeze(-1).unbind()
    inner = max(1, min(count, at_once(work.device) // (linears * out)))
    for first in range(0, count, inner):
        last = min(first + inner, count)
        for i in range(first, last):
            scale, zero = scales[lines, groups[i]], zeros[lines, groups[i]]
            if pull:
                work[:, i].sub_(torch.sub(work[:, i], exact[:, i]), alpha=pull)
            level = settle_(torch.div(work[:, i], scale, out=levels[:, i]), zero, spec)
            error = torch.sub(work[:, i], (level - zero).mul_(scale), out=errors[:, i])
            if pull:
                error.sub_(torch.sub(work[:, i], exact[:, i]), alpha=pull)
            error.div_(pivots[i])
            if i + 1 < last:
                work[:, i + 1:last].addcmul_(upper[:, i, i + 1:last, None], error[:, None], value=-1)
        work[:, last:].baddbmm_(upper[:, first:last, last:].mT, errors[:, first:last], alpha=-1)


METHOD = Method(name="gptq", paper="https://arxiv.org/abs/2210.17323", quantize=quantize,
                needs=frozenset({"hessian", "drift"}), options=GptqOptions,
                kinds=GRIDS, together=together,
                quick={"refit": 0, "descent_passes": 0, "learning_steps": 0})
