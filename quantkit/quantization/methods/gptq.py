"""GPTQ: quantize a column, spread its error over the columns that are left, repeat.

https://arxiv.org/abs/2210.17323; :mod:`~quantkit.quantization.methods.gptq_reference` has it as the paper
does. Minimizes ``tr((W - Q) H (W - Q)ᵀ)`` with ``H`` the mean of ``x xᵀ`` over calibration tokens. Groups are
*static*: their grids are fixed before solving, so that activation order changes only the order of solving and
every group keeps its place on disk.

Additions to the paper, on by default. The grids come from a search over shrunken and stretched ranges that
weighs each column's error by what it costs once the other columns have made up for it. After solving,
coordinate descent on the same loss visits every group's scale and every weight's level again
(:mod:`~quantkit.quantization.methods.descent`). A row that plain rounding serves better is kept rounded, so
that the loss on ``H`` is never above that of ``rtn`` of the same weights. What is solved for, and rounded,
aren't the model's weights, but those that make up for half of what earlier layers' errors have done to the
inputs (GPTAQ, https://arxiv.org/abs/2504.02692); a row's error in the manifest contains that.

The loop over columns exists three times, for speed alone: on a CPU our kernels take all columns of 64 rows at
a time (:mod:`quantkit.ops.columns`); on a GPU a kernel takes a block of columns; where there is no kernel,
torch does what the GPU's does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from pydantic import Field

from quantkit.formats.base import Codes
from quantkit.formats.dtypes import dtype_name, scale_dtype
from quantkit.formats.spec import QuantSpec
from quantkit.ops import columns, gpu
from quantkit.quantization.memory import WEIGHTS_AT_ONCE
from quantkit.quantization.methods import trellis
from quantkit.quantization.methods.base import LayerStats, Method, MethodOptions, row_parts
from quantkit.quantization.methods.descent import (
    by_column,
    descend_levels,
    descend_scales,
    refit_scales,
    stacked,
)
from quantkit.quantization.methods.grid import (
    GRIDS,
    Grid,
    above_minima,
    at_once,
    check_finite,
    choose_grid,
    from_grid,
    has_plain_scales,
    rising,
    round_levels_,
    round_to_grid,
    to_codes,
)
from quantkit.quantization.methods.hessian import (
    NO_BETTER,
    HessianFactors,
    column_costs,
    damped,
    factorize,
    hessian_of,
    losses,
    rows_below,
    undrifted,
)


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
            refit a group's scale in each pass, before its levels, and add passes only to reach this number.
        descent_passes: passes of coordinate descent over all levels after solving.
        drift: share of the inputs' drift from the original model's that the weights make up for.
        compare: keep a row rounded where that is no worse.
    """

    damp: float = Field(default=0.05, gt=0, le=1)
    act_order: bool = True
    block: int = Field(default=128, ge=1)
    clip_search: bool = True
    refit: int = Field(default=3, ge=0, le=20)
    descent_passes: int = Field(default=3, ge=0, le=100)
    drift: float = Field(default=0.5, ge=0, le=1)
    compare: bool = True


@dataclass
class PendingSolve:
    """A weight that is to be solved.

    Attributes:
        weight: float32 ``[out, in]``.
        hessian: float32 ``[in, in]``.
        factors: the factors of the damped Hessian. They take as much memory as the Hessian, and so they are
            dropped once the columns are solved.
        plain: the grid of plain rounding.
        grid: the grid to solve on; the CPU's kernels search for one of their own.
        notes: fallbacks taken before.
    """

    weight: torch.Tensor
    hessian: torch.Tensor
    factors: HessianFactors | None
    plain: Grid
    grid: Grid
    notes: tuple[str, ...]


def quantize(weight: torch.Tensor, stats: LayerStats | None, spec: QuantSpec,
             options: MethodOptions) -> Codes:
    """Solve ``weight`` (float32 ``[out, in]``) under ``stats.hessian`` (float32 ``[in, in]``).

    Falls back to rounding, with a note, when the Hessian is zero or can't be factorized.

    Raises:
        CalibrationError: no Hessian, one of another size, or one that isn't finite.
        SpecError: the weight isn't finite, or is beyond the range of the scales' dtype.
    """
    return quantize_batch([weight], [stats], spec, options)[0]


def quantize_batch(weights: Sequence[torch.Tensor], stats: Sequence[LayerStats | None], spec: QuantSpec,
                   options: MethodOptions) -> list[Codes]:
    """The same for several weights of one shape. Without our CPU kernels, a column of all of them is solved
    at a time: of small ones that is hardly more work than one.

    Raises:
        CalibrationError, SpecError: as :func:`quantize`.
    """
    assert isinstance(options, GptqOptions)
    results: dict[int, Codes] = {}
    pending: dict[int, PendingSolve] = {}
    factored: dict[int, tuple[HessianFactors | None, tuple[str, ...]]] = {}
    by_kernels = solved_by_kernels(spec, weights[0].device)
    for number, (weight, known) in enumerate(zip(weights, stats, strict=True)):
        check_finite(weight)
        hessian = hessian_of(weight, known)
        if id(known) in factored:
            factors, notes = factored.pop(id(known))
        else:
            factors, notes = factorize(hessian, options.damp, options.act_order)
        if any(other is known for other in stats[number + 1:]):  # Linears with the same input
            factored[id(known)] = factors, notes
        if factors is not None and known is not None and known.drift is not None and options.drift:
            weight = undrifted(weight, known.drift, factors, options.drift)
            check_finite(weight)
        if spec.kind == "trellis":
            results[number] = trellis.solve(weight, hessian, factors, spec, options.descent_passes, notes)
            continue
        plain = choose_grid(weight, spec)
        if factors is None:
            results[number] = to_codes(round_to_grid(weight, plain, spec), plain, spec, notes)
            continue
        grid = plain if by_kernels or not options.clip_search else choose_grid(
            weight, spec, importance=column_costs(factors), search=True, outer=plain.outer)
        task = PendingSolve(weight, hessian, factors, plain, grid, notes)
        del factors  # as large as the Hessian
        if by_kernels:
            results[number] = _solve_by_kernels(task, spec, options)
        else:
            pending[number] = task
    if pending:
        results |= zip(pending, _solve_by_torch([*pending.values()], spec, options), strict=True)
    return [results[number] for number in range(len(weights))]


def _unless_rounded(task: PendingSolve, levels: torch.Tensor, grid: Grid, part: slice,
                    spec: QuantSpec, options: GptqOptions) -> tuple[Codes, torch.Tensor]:
    """Solved rows; rounded where that is no worse, bool ``[out]``, if the options say so."""
    if not options.compare:
        return to_codes(levels, grid, spec), torch.zeros(len(levels), dtype=torch.bool)
    weight, plain = task.weight[part], task.plain.rows(part)
    rounded = round_to_grid(weight, plain, spec)
    errors = weight - from_grid(levels, grid), weight - from_grid(rounded, plain)
    if spec.granularity.strategy in ("tensor", "tile"):  # one scale for several rows: all of them or none
        solved, baseline = (_shared(losses(error, task.hessian), spec) for error in errors)
        worse = ~(solved <= baseline)  # also where a loss is NaN
    else:
        worse = ~rows_below(*errors, task.hessian)
    best = plain.where(worse, grid)
    return to_codes(torch.where(worse.unsqueeze(1), rounded, levels), best, spec), worse


# by our kernels for CPUs


def solved_by_kernels(spec: QuantSpec, device: torch.device) -> bool:
    """Whether our kernels for CPUs solve this: at most 256 levels, but no 8-bit floats, and scales that
    belong to one row each."""
    return ((spec.kind in ("int", "iq") or spec.grid == "fp4")
            and spec.granularity.strategy in ("channel", "group") and columns.by_kernel(device))


def _solve_by_kernels(task: PendingSolve, spec: QuantSpec, options: GptqOptions) -> Codes:
    codes, failed = list[Codes](), True
    parts = row_parts(task.weight, spec, WEIGHTS_AT_ONCE, columns.ROWS)
    assert task.factors is not None
    costs = column_costs(task.factors) if options.clip_search else None
    solved = [_solve_tiles(task.weight[part], task.factors, task.plain.rows(part), spec, costs)
              for part in parts]
    damping, task.factors = task.factors.damping, None
    form = damped(task.hessian, damping) if options.descent_passes or options.refit else None
    for part in parts:
        levels, grid = solved.pop(0)
        if form is None:
            levels = columns.untile(levels.float(), len(task.weight[part]))
        else:
            levels, grid = _descend_tiles(task.weight[part], levels, grid, form, spec, options)
        better, worse = _unless_rounded(task, levels, grid, part, spec, options)
        codes.append(better)
        failed &= bool(worse.all())
    return Codes.joined(codes, task.notes + (NO_BETTER,) * failed)


def _solve_tiles(weight: torch.Tensor, factors: HessianFactors, grid: Grid, spec: QuantSpec,
                 costs: torch.Tensor | None) -> tuple[torch.Tensor, Grid]:
    """Choose ranges and solve the columns.

    Args:
        weight: float32 ``[rows, in]``.
        grid: the grid of plain rounding, used where there is no search.
        spec: a spec that :func:`solved_by_kernels` takes.
        costs: float32 ``[in]``, of a column's squared error, to search for ranges by; ``None``: no search.

    Returns:
        Levels ``[tiles, in, 64]``, uint8 or, of a table, float16; and their grid.
    """
    size, order = weight.shape[1] // grid.scale.shape[1], factors.order
    if costs is not None:
        grid = choose_grid(weight, spec, importance=costs, search=True, outer=grid.outer)
    scale, zero = columns.tiles(grid.scale, 1.0), columns.tiles(grid.zero)
    tiled = columns.tiles(above_minima(weight, grid))[:, order]
    table = rising(spec)
    solved = columns.solve_columns(tiled, factors.upper, scale, zero, order // size, spec.bits, table)
    stored = solved.to(torch.float16 if table else torch.uint8)
    levels = torch.empty_like(stored)
    levels[:, order] = stored
    return levels, grid


def _descend_tiles(weight: torch.Tensor, levels: torch.Tensor, grid: Grid, form: torch.Tensor,
                   spec: QuantSpec, options: GptqOptions) -> tuple[torch.Tensor, Grid]:
    """Coordinate descent on what :func:`_solve_tiles` has returned, under the damped Hessian ``form``.

    Returns:
        Levels float32 ``[rows, in]`` and their grid.
    """
    levels, refits = levels.float(), options.refit
    if not has_plain_scales(spec):
        return _descend_in_turns(weight, levels, grid, form, spec, options)
    rows, size = len(weight), weight.shape[1] // grid.scale.shape[1]
    scale, zero = columns.tiles(grid.scale, 1.0), columns.tiles(grid.zero)
    tiled = columns.tiles(weight)

    def slopes_now() -> torch.Tensor:
        return columns.tiles(columns.untile(_errors_of_tiles(tiled, levels, scale, zero), rows) @ form)

    slopes = slopes_now()

    def descend_columns(dtype: str | None, descent_passes: int, refits: int) -> None:
        columns.descend_columns(slopes, levels, scale, zero, form, spec.bits, dtype, descent_passes, refits)

    def refit() -> None:
        better = descend_scales(weight, columns.untile(levels, rows), _untiled(scale, zero, rows), form, spec,
                                refits)
        scale.copy_(columns.tiles(better.scale, 1.0))
        slopes.copy_(slopes_now())

    if not refits or size <= columns.LARGEST_GROUP:
        descend_columns(dtype_name(scale_dtype(spec)) if refits else None, options.descent_passes, refits)
    else:
        refit()
        for _ in range(options.descent_passes):
            descend_columns(None, 1, 0)
            refit()
    return columns.untile(levels, rows), _untiled(scale, zero, rows)


def _descend_in_turns(weight: torch.Tensor, levels: torch.Tensor, grid: Grid, form: torch.Tensor,
                      spec: QuantSpec, options: GptqOptions) -> tuple[torch.Tensor, Grid]:
    """Levels by the kernels, then scales by torch, and so on: what scales may be is the spec's business."""
    rows = len(weight)
    for last in [False] * options.descent_passes + [True]:
        grid = refit_scales(weight, columns.untile(levels, rows), grid, form, spec,
                            options.refit if last else min(options.refit, 1))
        if not last:
            off = weight - from_grid(columns.untile(levels, rows), grid)
            columns.descend_columns(columns.tiles(off @ form), levels, columns.tiles(grid.scale, 1.0),
                                    columns.tiles(grid.zero), form, spec.bits, None, 1, 0, rising(spec))
    return columns.untile(levels, rows), grid


def _untiled(scale: torch.Tensor, zero: torch.Tensor, rows: int) -> Grid:
    return Grid(*(columns.untile(part, rows).contiguous() for part in (scale, zero)))


def _errors_of_tiles(tiled: torch.Tensor, levels: torch.Tensor, scale: torch.Tensor,
                     zero: torch.Tensor) -> torch.Tensor:
    """What the weights are off, ``[tiles, in, 64]``."""
    groups = (scale.shape[0], scale.shape[1], -1, scale.shape[2])
    values = (levels.view(groups) - zero.unsqueeze(2)).mul_(scale.unsqueeze(2))
    return torch.sub(tiled, values.view(tiled.shape), out=values.view(tiled.shape))


# by torch, and on a GPU by a kernel for a block of columns


def _solve_by_torch(pending: Sequence[PendingSolve], spec: QuantSpec, options: GptqOptions) -> list[Codes]:
    parts = row_parts(pending[0].weight, spec, WEIGHTS_AT_ONCE // len(pending))
    levels = torch.stack([torch.empty_like(task.weight) for task in pending])
    factors = [task.factors for task in pending if task.factors]
    upper = stacked([factor.upper for factor in factors])
    order = torch.stack([factor.order for factor in factors])
    for part in parts:
        grids = [task.grid.rows(part) for task in pending]
        weights = [above_minima(task.weight[part], grid) for task, grid in zip(pending, grids, strict=True)]
        levels[:, part] = _solve_columns(weights, grids, upper, order, spec, options.block)
    damping = [factor.damping for factor in factors]
    for task in pending:
        task.factors = None
    del upper, factors  # as large as what comes now
    form = stacked([damped(task.hessian, added) for task, added in zip(pending, damping, strict=True)])
    codes: list[list[Codes]] = [[] for _ in pending]
    failed = [True] * len(pending)
    for part in parts:
        grids = _descend(pending, levels, part, form, spec, options)
        for number, task in enumerate(pending):
            better, worse = _unless_rounded(task, levels[number, part], grids[number], part, spec,
                                            options)
            codes[number].append(better)
            failed[number] &= bool(worse.all())
    return [Codes.joined(codes[number], task.notes + (NO_BETTER,) * failed[number])
            for number, task in enumerate(pending)]


def _descend(pending: Sequence[PendingSolve], levels: torch.Tensor, part: slice, form: torch.Tensor,
             spec: QuantSpec, options: GptqOptions) -> list[Grid]:
    """Coordinate descent under ``form``, the damped Hessians; writes these rows' levels."""
    refit = descend_scales if has_plain_scales(spec) or spec.grid == "fp" else refit_scales
    rounds = 0 if spec.grid == "fp tiles" else options.refit  # their scales stay as the search has found them

    def refitted(grids: Sequence[Grid]) -> list[Grid]:
        return [refit(task.weight[part], levels[number, part], grids[number], form[number], spec, rounds)
                for number, task in enumerate(pending)]

    weight = stacked([task.weight[part] for task in pending])
    grids = refitted([task.grid.rows(part) for task in pending])
    for _ in range(options.descent_passes):
        levels[:, part] = descend_levels(weight, levels[:, part], grids, form, spec, options.block)
        grids = refitted(grids)
    return grids


def _solve_columns(weights: Sequence[torch.Tensor], grids: Sequence[Grid], upper: torch.Tensor,
                   order: torch.Tensor, spec: QuantSpec, block: int) -> torch.Tensor:
    """The levels, float32 ``[linears, out, in]``. Works on the transpose, where a column is contiguous."""
    work = torch.stack([weight.T[places] for weight, places in zip(weights, order, strict=True)])
    count, out = work.shape[1:]
    scales, zeros = by_column(grids, out)
    groups = order // (count // scales.shape[1])
    fused = spec.kind == "int" and gpu.reason_against(work.device.type, work.dtype) is None
    if fused:
        from quantkit_kernels.triton.gptq import LONGEST, solve_block

        block = min(block, LONGEST)
    levels = torch.empty_like(work)
    errors = torch.empty(len(work), min(block, count), out, device=work.device)
    for start in range(0, count, block):
        stop = min(start + block, count)
        here = slice(start, stop)
        corner, block_errors = upper[:, here, here], errors[:, :stop - start]
        if fused:
            solve_block(work[:, here], corner, scales, zeros, groups[:, here], spec.bits, levels[:, here],
                        block_errors)
        else:
            _solve_block(work[:, here], corner, scales, zeros, groups[:, here], spec, levels[:, here],
                         block_errors)
        work[:, stop:].baddbmm_(upper[:, here, stop:].mT, block_errors, alpha=-1)
    solved = torch.empty_like(levels)
    for number, places in enumerate(order):
        solved[number, places] = levels[number]
    return solved.mT.contiguous()


def _solve_block(work: torch.Tensor, upper: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor,
                 places: torch.Tensor, spec: QuantSpec, levels: torch.Tensor, errors: torch.Tensor) -> None:
    """Some columns: writes ``levels`` and ``errors``, ``[linears, columns, out]``; uses ``work`` up."""
    linears, count = work.shape[:2]
    lines: slice | torch.Tensor = torch.arange(linears, device=work.device)
    groups: Sequence[int | torch.Tensor] = places.T.unbind()
    if linears == 1:  # spares copies
        lines, groups = slice(None), places[0].tolist()
    pivots = upper.diagonal(dim1=1, dim2=2).T.unsqueeze(-1).unbind()
    inner = max(1, min(count, at_once(work.device) // work[:, 0].numel()))
    for first in range(0, count, inner):
        last = min(first + inner, count)
        for i in range(first, last):
            scale, zero = scales[lines, groups[i]], zeros[lines, groups[i]]
            level = round_levels_(torch.div(work[:, i], scale, out=levels[:, i]), zero, spec)
            error = torch.sub(work[:, i], (level - zero).mul_(scale), out=errors[:, i]).div_(pivots[i])
            if i + 1 < last:
                work[:, i + 1:last].addcmul_(upper[:, i, i + 1:last, None], error[:, None], value=-1)
        work[:, last:].baddbmm_(upper[:, first:last, last:].mT, errors[:, first:last], alpha=-1)


METHOD = Method(name="gptq", paper="https://arxiv.org/abs/2210.17323", quantize=quantize,
                needs=frozenset({"hessian", "drift"}), options=GptqOptions,
                kinds=GRIDS, quantize_batch=quantize_batch,
                quick={"refit": 0, "descent_passes": 0, "compare": False})


def _shared(values: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """The sum over the rows that have a scale in common, in the place of every one, float32 ``[out]``."""
    size = len(values) if spec.granularity.strategy == "tensor" else spec.granularity.size or 1
    sums = F.pad(values, (0, -len(values) % size)).view(-1, size).sum(dim=1)
    return sums.repeat_interleave(size)[:len(values)]
