"""Grids: finding a group's scale and zero point, rounding to them, and back.

A uniform grid of ``b`` bits has levels ``0 … 2 ** b - 1`` and stands for ``(level - zero) * scale``. The
symmetric scale is ``max|w| / ((2 ** b - 1) / 2)``, that of compressed-tensors, with the zero at level
``2 ** (b - 1)``; the asymmetric one spans ``[min(w, 0), max(w, 0)]`` with an integer zero, so that 0
is always exact. Scales are rounded to the dtype they are stored in *before* anything is rounded to
them. Shrinking the extremes clips outliers in exchange for finer levels (OCTAV,
https://arxiv.org/abs/2206.06501, has the trade-off's analysis; here it is a plain search).

The levels of kind ``fp`` are e4m3's numbers, its zero is 0 and its scale ``max|w| / 448``. Its precision is
relative: a search stretches the range within a factor of 2, to where the weights lie near to levels.

Scales may be of a square of weights each: DeepSeek's fp8, https://arxiv.org/abs/2412.19437. Squares at the
right and lower edge of a weight may be cut. So that methods need not know about squares, their grid has a
scale for every weight, as if each were a group by itself; codes have one a square.

A search over extremes alone doesn't find the scales of grids that are signed, have minima or superblocks, or
whose scales have few bits. There a candidate is a step between levels; weights are put on the nearest levels,
and the scale (with a minimum) that then fits best is a least-squares fit. The best candidate's fit is taken,
each group for itself. A superblock's number is the one with which the groups' scales, as whole multiples,
lose least.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from quantkit.formats import e2m1
from quantkit.formats.base import Codes
from quantkit.formats.dtypes import dtype_name, resolve, scale_dtype
from quantkit.formats.e4m3 import LARGEST, nearest_
from quantkit.formats.finite import all_finite
from quantkit.formats.level_values import encode, level_table, spread_tiles
from quantkit.formats.spec import GROUP_SCALES, QuantSpec
from quantkit.ops import columns
from quantkit.quantization.methods.stored_scales import (
    multiples,
    round_scale,
    rounded_minimum,
    rounded_multiple,
    rounded_scale,
)
from quantkit.support.errors import SpecError

SHRINKS = tuple(1 + 0.025 * step for step in range(4, -20, -1))
"""Factors on a group's extremes that a clip search tries. Above 1 the levels between the extremes move."""
STRETCHES = tuple(2 ** (step / 24) for step in range(24))
"""The same for kind ``fp``: beyond twice the range all levels but the smallest come again."""

SERIAL = (1 << 15) - 1
"""The number of values up to which torch runs an elementwise operation in one thread. Loops of many short
operations stay below it: parallel regions that are this short crawl when other work wants the cores."""


LAUNCHED = 1 << 26
"""The same on a GPU: the number of values on which an operation works as long as its launch takes."""

GRIDS = frozenset({"int", "int minima", "int superblocks", "iq", "fp", "fp tiles", "fp4", "trellis"})
"""The grids that rounding and GPTQ know."""
STEPS = tuple(1.12 - 0.03 * step for step in range(19))
"""Factors on the step between levels that a search tries: from a range that is wider than the weights' on."""
WIDTHS = tuple(1.06 - 0.02 * step for step in range(12))
"""Factors on a superblock's number that are tried."""
_LEAST_SCALE = 1e-30

FARTHEST = 2.0**21
"""Quotients are clamped to this before rounding: further out, every level is clamped anyway."""

_WHOLE = 1.5 * 2**23  # float32 has no fractions up here: adding it rounds, taking it away leaves the result


@dataclass(frozen=True)
class Grid:
    """The grids of a weight's groups, float32; see :class:`~quantkit.formats.base.Codes`.

    Attributes:
        scale: ``spec.scale_shape``, finite and rounded; positive unless the spec's scales have a sign. Of
            squares of weights: ``[out, in]``, that of every weight (:func:`tile_grid`).
        zero: the level, or where levels come from a table the value, that means 0; of the same shape.
        minimum: the minima, of the same shape, if the spec has minima.
        outer, outer_minimum: ``spec.outer_shape``, if scales are multiples of something.
    """

    scale: torch.Tensor
    zero: torch.Tensor
    minimum: torch.Tensor | None = None
    outer: torch.Tensor | None = None
    outer_minimum: torch.Tensor | None = None

    def rows(self, part: slice) -> Grid:
        """That of some rows, where rows have scales of their own; all of it for ``slice(None)``."""
        def some(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return tensor if tensor is None or len(tensor) == 1 else tensor[part]

        return Grid(self.scale[part], self.zero[part], some(self.minimum), some(self.outer),
                    some(self.outer_minimum))

    def where(self, pick: torch.Tensor, other: Grid) -> Grid:
        """This one for the rows in ``pick``, bool ``[out]``, ``other`` for the rest."""
        def chosen(tensor: torch.Tensor | None, instead: torch.Tensor | None) -> torch.Tensor | None:
            if tensor is None or instead is None:
                return None
            return torch.where(pick[:len(tensor)].unsqueeze(1), tensor, instead)

        scale, zero = chosen(self.scale, other.scale), chosen(self.zero, other.zero)
        assert scale is not None and zero is not None
        return Grid(scale, zero, chosen(self.minimum, other.minimum), chosen(self.outer, other.outer),
                    chosen(self.outer_minimum, other.outer_minimum))


def at_once(device: torch.device) -> int:
    """Values that an operation of many should take, so that none takes longer than it must."""
    return SERIAL if device.type == "cpu" else LAUNCHED


def check_finite(weight: torch.Tensor) -> None:
    """Raises SpecError if a weight is NaN or infinite: no scale can stand for it."""
    if not all_finite(weight):
        bad = int((~torch.isfinite(weight)).sum())
        raise SpecError(f"the weight holds {bad} values that are NaN or infinite",
                        why="a quantized layer can't represent them; the model itself is damaged")


def check_in_range(weight: torch.Tensor, spec: QuantSpec) -> None:
    """Raises SpecError if a weight is beyond the range of the dtype that scales are stored in."""
    if spec.scale_dtype in GROUP_SCALES:  # e4m3 has a number of the tensor's beside it, e8m0 float32's range
        return
    limit = torch.finfo(scale_dtype(spec)).max
    if max(-float(weight.min()), float(weight.max())) > limit:
        raise SpecError(f"a weight is above {limit:g}, the range of {spec.scale_dtype} scales",
                        next="scale_dtype: bfloat16")


def choose_grid(weight: torch.Tensor, spec: QuantSpec, *, importance: torch.Tensor | None = None,
                search: bool = False, outer: torch.Tensor | None = None) -> Grid:
    """The grid of every group, for every kind of grid but ``nf`` and ``trellis``.

    Args:
        weight: float32 ``[out, in]``, finite.
        spec: groups divide *in*.
        importance: float32 ``[in]``, a weight on each column's squared error in the search.
        search: look for the scales with the least squared error; otherwise they follow from the extremes.
        outer: float32 ``[1, 1]``: what ``e4m3`` scales are multiples of, if that is decided already.

    Raises:
        SpecError: a weight is beyond the range of the scales' dtype.
    """
    if (search and has_plain_scales(spec) and spec.granularity.strategy in ("channel", "group")
            and columns.by_kernel(weight.device)):
        return _searched_by_kernel(weight, spec, importance)
    factors = search_factors(spec) if search else (1.0,)
    if spec.grid == "fp tiles":
        return tile_grid(weight, spec, importance=importance, shrinks=factors)
    if spec.grid == "fp" or (spec.grid == "int" and not spec.signed):
        return find_grid(weight, spec, importance=importance, shrinks=factors)
    shape = spec.scale_shape((weight.shape[0], weight.shape[1]))
    check_in_range(weight, spec)
    if spec.scale_dtype == "e4m3" and outer is None:
        outer = _power(weight.abs().max().reshape(1, 1) / (e2m1.LARGEST * LARGEST))
    fits = []
    for groups, costs in _portions(weight, shape, importance):
        cost = torch.ones_like(groups) if costs is None else costs
        fits.append(_fit_pair(groups, cost, spec, search) if spec.minimum
                    else _fit_scale(groups, cost, spec, search, outer))
    scale = torch.cat([fit.scale for fit in fits]).reshape(shape)
    bottom = torch.cat([fit.minimum for fit in fits]).reshape(shape) if spec.minimum else None
    if spec.superblock is not None:
        curve = torch.cat([fit.curve for fit in fits]).reshape(shape)
        return _superblocks(scale, bottom, curve, spec, search)
    return _finished(rounded_scale(scale, spec, outer),
                     None if bottom is None else rounded_minimum(bottom, spec), spec, outer)


def has_plain_scales(spec: QuantSpec) -> bool:
    """Whether a scale is a positive number by itself, in a dtype, and a zero a level: our kernels for CPUs
    then choose scales too."""
    return spec.grid == "int" and not spec.signed


def _searched_by_kernel(weight: torch.Tensor, spec: QuantSpec, importance: torch.Tensor | None) -> Grid:
    check_in_range(weight, spec)
    rows, inputs = weight.shape
    size = inputs // spec.scale_shape((rows, inputs))[1]
    costs = torch.ones(inputs) if importance is None else importance
    tiled = columns.search_ranges(columns.tiles(weight), costs, size, SHRINKS, spec.bits, spec.symmetric,
                                  dtype_name(scale_dtype(spec)))
    return Grid(*(columns.untile(part, rows).contiguous() for part in tiled))


def find_grid(weight: torch.Tensor, spec: QuantSpec, *, importance: torch.Tensor | None = None,
              shrinks: tuple[float, ...] = (1.0,)) -> Grid:
    """The grid of every group.

    Args:
        weight: float32 ``[out, in]``, finite.
        spec: a spec with the grid ``int`` or ``fp``; its groups divide *in*.
        importance: float32 ``[in]``, a weight on each column's squared error in the search, such as
            the diagonal of a Hessian.
        shrinks: factors on the extremes; the one with the least squared error wins in each group.

    Raises:
        SpecError: a weight is beyond the range of the scales' dtype.
    """
    shape = spec.scale_shape((weight.shape[0], weight.shape[1]))
    check_in_range(weight, spec)
    grids = [search_groups(groups, spec, costs, shrinks)
             for groups, costs in _portions(weight, shape, importance)]
    return Grid(torch.cat([grid.scale for grid in grids]).reshape(shape),
                torch.cat([grid.zero for grid in grids]).reshape(shape))


def _portions(weight: torch.Tensor, shape: tuple[int, ...],
              importance: torch.Tensor | None) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Some groups ``[n, size]`` at a time, so that a search's copies stay small, with the weights on their
    squared errors in the same shape."""
    groups = weight.reshape(shape[0] * shape[1], -1)
    step = max(1, at_once(weight.device) // groups.shape[1])
    costs = None if importance is None else costs_of_groups(importance, shape, groups.shape[1], step)
    for start in range(0, len(groups), step):
        part, first = groups[start:start + step], start % shape[1]
        yield part, None if costs is None else costs[first:first + len(part)]


def round_to_grid(weight: torch.Tensor, grid: Grid, spec: QuantSpec) -> torch.Tensor:
    """The nearest level of every weight, float32 ``[out, in]``."""
    groups = above_minima(weight, grid).reshape(grid.scale.numel(), -1)
    levels = round_levels_(groups / grid.scale.reshape(-1, 1), grid.zero.reshape(-1, 1), spec)
    return levels.reshape(weight.shape)


def above_minima(weight: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The weight less its groups' minima, so that its levels begin at 0; itself where there are none."""
    if grid.minimum is None:
        return weight
    groups = weight.reshape(*grid.minimum.shape, -1)
    return (groups - grid.minimum.unsqueeze(-1)).reshape(weight.shape)


def round_levels_(quotients: torch.Tensor, zero: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """Weights over their scales, in place, → the nearest levels; those of a table are its values."""
    table = rising(spec)
    if table is not None:
        values = torch.tensor(table, device=quotients.device)
        return quotients.copy_(values[torch.bucketize(quotients, (values[1:] + values[:-1]) / 2)])
    if spec.kind == "fp":
        return nearest_(quotients)
    return whole_(quotients.clamp_(-FARTHEST, FARTHEST)).add_(zero).clamp_(0, 2**spec.bits - 1)


def rising(spec: QuantSpec) -> tuple[float, ...] | None:
    """The values of levels, rising and each one once, where they aren't equal steps."""
    table = level_table(spec)
    return None if table is None else tuple(sorted(set(table)))


def search_factors(spec: QuantSpec) -> tuple[float, ...]:
    """Factors on a group's extremes that a search tries."""
    return STRETCHES if spec.kind == "fp" else SHRINKS


def from_grid(levels: torch.Tensor, grid: Grid) -> torch.Tensor:
    """``(level - zero) * scale``, plus the minimum if there is one, float32 ``[out, in]``."""
    groups = levels.reshape(grid.scale.numel(), -1)
    values = (groups - grid.zero.reshape(-1, 1)) * grid.scale.reshape(-1, 1)
    if grid.minimum is not None:
        values += grid.minimum.reshape(-1, 1)
    return values.reshape(levels.shape)


def whole_(values: torch.Tensor) -> torch.Tensor:
    """Round in place to the nearest whole number, ties to even; for values within ±4 million.

    The same as ``round_``, which torch splits over threads from 2048 values on.
    """
    return values.add_(_WHOLE).sub_(_WHOLE)


def to_codes(levels: torch.Tensor, grid: Grid, spec: QuantSpec, notes: tuple[str, ...] = ()) -> Codes:
    """Levels and their grid as :class:`Codes`."""
    zero = None if spec.symmetric or spec.minimum else grid.zero.to(torch.uint8)
    scale = grid.scale.contiguous()
    if spec.granularity.strategy == "tile":
        places = scale[::spec.granularity.size, ::spec.granularity.size]
        scale = places.clone(memory_format=torch.contiguous_format)  # one number would keep its strides
    return Codes(resolve(spec), encode(levels, spec), scale, zero, notes, grid.minimum, grid.outer,
                 grid.outer_minimum)


def search_groups(groups: torch.Tensor, spec: QuantSpec, cost: torch.Tensor | None,
                  shrinks: tuple[float, ...]) -> Grid:
    """``groups [n, g]`` → grids ``[n, 1]``; ties go to the earlier, wider factor."""
    low = groups.amin(dim=1, keepdim=True).clamp(max=0)
    high = groups.amax(dim=1, keepdim=True).clamp(min=0)
    best = grid_between(low * shrinks[0], high * shrinks[0], spec)
    if len(shrinks) == 1:
        return best
    scale, zero = best.scale, best.zero
    least = _error(groups, best, spec, cost)
    for factor in shrinks[1:]:
        grid = grid_between(low * factor, high * factor, spec)
        error = _error(groups, grid, spec, cost)
        better = error < least
        least = torch.where(better, error, least)
        scale = torch.where(better, grid.scale, scale)
        zero = torch.where(better, grid.zero, zero)
    return Grid(scale, zero)


def grid_between(low: torch.Tensor, high: torch.Tensor, spec: QuantSpec) -> Grid:
    """The grid of groups that reach from ``low`` (at most 0) to ``high`` (at least 0), in their shape."""
    top = 2**spec.bits - 1
    if spec.kind == "fp":
        zero = torch.zeros_like(low)
        return Grid(round_scale(torch.maximum(-low, high) / LARGEST, zero, spec), zero)
    if spec.symmetric:
        zero = torch.full_like(low, 2 ** (spec.bits - 1))
        return Grid(round_scale(torch.maximum(-low, high) / (top / 2), zero, spec), zero)
    # each end is divided first: their difference may be beyond float32
    scale = round_scale(high / top - low / top, torch.zeros_like(low), spec)
    zero = (-low / scale).round().clamp_(0, top)
    return Grid(scale, zero)


def _error(groups: torch.Tensor, grid: Grid, spec: QuantSpec, cost: torch.Tensor | None) -> torch.Tensor:
    """Sum of (weighted) squared errors ``[n, 1]``, worked out in levels to spare operations."""
    top = 2**spec.bits - 1
    scaled = groups / grid.scale
    if spec.kind == "fp":
        level = nearest_(scaled.clone())
    elif spec.symmetric:
        middle = 2 ** (spec.bits - 1)
        level = whole_(scaled.clamp(-middle, top - middle))
    else:
        level = whole_(torch.clamp(scaled, -grid.zero, top - grid.zero))
    error = level.sub_(scaled).square_()
    if cost is not None:
        error.mul_(cost)
    return error.sum(dim=1, keepdim=True).mul_(grid.scale.square())


def costs_of_groups(importance: torch.Tensor, shape: tuple[int, ...], size: int, count: int) -> torch.Tensor:
    """The importance of each weight of ``count`` groups from any group of a row on, ``[≥ count, size]``
    (one row stands for all where a group is one or more whole rows)."""
    if importance.numel() <= size:
        return importance.repeat(size // importance.numel()).expand(count, size)
    return importance.reshape(shape[1], size).repeat(count // shape[1] + 2, 1)


def tile_grid(weight: torch.Tensor, spec: QuantSpec, *, importance: torch.Tensor | None = None,
              shrinks: tuple[float, ...] = (1.0,)) -> Grid:
    """The grid of every square, for every weight of it: ``scale`` and ``zero`` float32 ``[out, in]``.

    Args:
        weight: float32 ``[out, in]``, finite.
        spec: with strategy ``tile``.
        importance: float32 ``[in]``, a weight on each column's squared error in the search.
        shrinks: factors on the extremes; the one with the least squared error wins in each square.

    Raises:
        SpecError: a weight is beyond the range of the scales' dtype.
    """
    rows, cols = weight.shape
    size = spec.granularity.size or 1
    check_in_range(weight, spec)
    down, across = spec.scale_shape((rows, cols))
    costs = None
    if importance is not None:
        each = F.pad(importance, (0, across * size - cols)).view(across, 1, size)
        costs = each.expand(across, size, size).reshape(across, -1)
    step, parts = max(1, at_once(weight.device) // size**2), []
    for strip in weight.split(size):
        padded = F.pad(strip, (0, across * size - cols, 0, size - len(strip)))  # zeros have no error
        squares = padded.view(size, across, size).transpose(0, 1).reshape(across, -1)
        for start in range(0, across, step):
            cost = None if costs is None else costs[start:start + step]
            parts.append(search_groups(squares[start:start + step], spec, cost, shrinks).scale)
    scale = spread_tiles(torch.cat(parts).view(down, across), size, (rows, cols)).contiguous()
    return Grid(scale, scale.new_zeros(()).expand_as(scale))  # a zero for all takes no memory


# by a least-squares fit of a group's scale, and of its minimum


class GroupFit(NamedTuple):
    """What fits some groups, each ``[n, 1]``.

    Attributes:
        scale: the scale of each.
        minimum: their minima; empty where the spec has none.
        curve: the cost of a change of the scale.
    """

    scale: torch.Tensor
    minimum: torch.Tensor
    curve: torch.Tensor


def _power(value: torch.Tensor) -> torch.Tensor:
    """The least power of 2 that isn't below a positive number. It is divided and multiplied by without
    rounding, so that layouts may store its reciprocal, and a sum of exponents beside it."""
    fraction, exponent = torch.frexp(value.clamp(min=_LEAST_SCALE))
    return torch.ldexp(torch.ones_like(value), exponent - (fraction == 0.5).int())


def _finished(scale: torch.Tensor, minimum: torch.Tensor | None, spec: QuantSpec,
              outer: torch.Tensor | None = None, outer_minimum: torch.Tensor | None = None) -> Grid:
    zero = 2 ** (spec.bits - 1) if spec.kind == "int" and minimum is None else 0
    return Grid(scale, torch.full_like(scale, zero), minimum, outer, outer_minimum)


def _fit_scale(groups: torch.Tensor, cost: torch.Tensor, spec: QuantSpec, search: bool,
               outer: torch.Tensor | None) -> GroupFit:
    """Scales of groups ``[n, g]``."""
    table = rising(spec)
    low, high = (table[0], table[-1]) if table else (-2.0 ** (spec.bits - 1), 2.0 ** (spec.bits - 1) - 1)
    below = groups.amin(dim=1, keepdim=True).clamp(max=0)
    above = groups.amax(dim=1, keepdim=True).clamp(min=0)
    bases = [torch.maximum(below / low, above / high)]
    if low != -high:
        bases.append(torch.minimum(above / low, below / high))
    if not search:
        # where the two ends differ, the side with the largest weight gets the level that is farthest out
        far = bases[0] if len(bases) == 1 else torch.where(-below >= above, below, above) / low
        return GroupFit(_safe(far), groups.new_empty(0), cost.sum(dim=1, keepdim=True))
    rounded = spec.scale_dtype in ("e4m3", "e8m0")
    best: GroupFit | None = None
    least = below
    for base in bases:
        for factor in STEPS:
            scale = _safe(base * factor)
            if rounded:
                scale = rounded_scale(scale, spec, outer)
            level = _signed_levels(groups / scale, spec)
            weighed = level * cost
            curve = (weighed * level).sum(dim=1, keepdim=True)
            slope = (weighed * groups).sum(dim=1, keepdim=True)
            if rounded:
                error = curve * scale.square() - 2 * slope * scale
            else:
                nearest = slope / curve.clamp(min=_LEAST_SCALE)
                scale, error = torch.where(curve > 0, nearest, scale), -slope * nearest
            fit = GroupFit(scale, groups.new_empty(0), curve)
            if best is None:
                best, least = fit, error
                continue
            better = error < least
            least = torch.where(better, error, least)
            best = GroupFit(torch.where(better, scale, best.scale), fit.minimum,
                            torch.where(better, curve, best.curve))
    assert best is not None
    return GroupFit(_safe(best.scale), best.minimum, best.curve)


def _fit_pair(groups: torch.Tensor, cost: torch.Tensor, spec: QuantSpec, search: bool) -> GroupFit:
    """Scales and minima of groups ``[n, g]``. A superblock's minima are never above 0."""
    top = 2.0**spec.bits - 1
    low, high = groups.amin(dim=1, keepdim=True), groups.amax(dim=1, keepdim=True)
    if spec.superblock is not None:
        low = low.clamp(max=0)
    total = cost.sum(dim=1, keepdim=True)
    best = GroupFit(_safe((high - low) / top), low, total)
    if not search:
        return best
    center, least = (high + low) / 2, torch.full_like(low, torch.inf)
    sums = (cost * groups).sum(dim=1, keepdim=True)
    for factor in STEPS:
        scale = _safe((high - low) / top * factor)
        bottom = center - scale * (top / 2)
        for _ in range(2):
            level = ((groups - bottom) / scale).round_().clamp_(0, top)
            fit = _fit_levels(level, groups, cost, total, sums, spec)
            scale, bottom = fit.scale, fit.minimum
        level = ((groups - bottom) / scale).round_().clamp_(0, top)
        error = (cost * (groups - level * scale - bottom).square()).sum(dim=1, keepdim=True)
        better = error < least
        least = torch.where(better, error, least)
        best = GroupFit(*(torch.where(better, new, old) for new, old in zip(fit, best, strict=True)))
    return best


def _fit_levels(level: torch.Tensor, groups: torch.Tensor, cost: torch.Tensor, total: torch.Tensor,
                sums: torch.Tensor, spec: QuantSpec) -> GroupFit:
    """The scale and minimum that fit best with these levels."""
    weighed = cost * level
    first, second = weighed.sum(dim=1, keepdim=True), (weighed * level).sum(dim=1, keepdim=True)
    mixed = (weighed * groups).sum(dim=1, keepdim=True)
    determinant = total * second - first.square()
    scale = (total * mixed - first * sums) / determinant.clamp(min=_LEAST_SCALE)
    bottom = (sums - scale * first) / total.clamp(min=_LEAST_SCALE)
    if spec.superblock is not None:
        over = bottom > 0
        scale = torch.where(over, mixed / second.clamp(min=_LEAST_SCALE), scale)
        bottom = torch.where(over, torch.zeros_like(bottom), bottom)
        determinant = torch.where(over, second, determinant)
    usable = (determinant > 0) & (scale > 0)
    flat = sums / total.clamp(min=_LEAST_SCALE)  # all weights on one level
    flat = flat.clamp(max=0) if spec.superblock is not None else flat
    return GroupFit(torch.where(usable, scale, torch.full_like(scale, _LEAST_SCALE)),
                    torch.where(usable, bottom, flat), second)


def _superblocks(scale: torch.Tensor, minimum: torch.Tensor | None, curve: torch.Tensor, spec: QuantSpec,
                 search: bool) -> Grid:
    outer, scale = _fit_superblocks(scale, curve, spec, search)
    if minimum is None:
        return _finished(scale, None, spec, outer)
    outer_minimum, depth = _fit_superblocks(-minimum, torch.ones_like(curve), spec, search, zero=True)
    return _finished(scale, -depth, spec, outer, outer_minimum)


def _fit_superblocks(values: torch.Tensor, curve: torch.Tensor, spec: QuantSpec, search: bool,
               zero: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """A superblock's number ``[out, superblocks]``, and values ``[out, groups]`` as multiples of it, none of
    them 0 unless ``zero``."""
    size = spec.granularity.size or 1
    each = (spec.superblock or size) // size
    parts, weights = values.reshape(-1, each), curve.reshape(-1, each).clamp(min=_LEAST_SCALE)
    lowest, highest = multiples(spec)
    far = parts.gather(1, parts.abs().argmax(dim=1, keepdim=True))
    base = far / (lowest if lowest else highest)
    shape = (values.shape[0], -1)
    best = rounded_scale(_safe(base), spec)
    if search:
        least = torch.full_like(best, torch.inf)
        for factor in WIDTHS:
            step = rounded_scale(_safe(base * factor), spec)
            count = rounded_multiple(parts / step, spec, zero)
            fit = (weights * count * parts).sum(1, keepdim=True) / (weights * count.square()).sum(
                1, keepdim=True).clamp(min=_LEAST_SCALE)
            step = rounded_scale(_safe(torch.where(fit.abs() > _LEAST_SCALE, fit, step)), spec)
            count = rounded_multiple(parts / step, spec, zero)
            error = (weights * (parts - step * count).square()).sum(1, keepdim=True)
            better = error < least
            least, best = torch.where(better, error, least), torch.where(better, step, best)
    products = best * rounded_multiple(parts / best, spec, zero)
    return best.reshape(shape), products.reshape(values.shape)


def _signed_levels(quotients: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """Levels less their zero."""
    if spec.kind != "int":
        return round_levels_(quotients, quotients, spec)
    low = -2.0 ** (spec.bits - 1)
    return quotients.clamp_(low, -low - 1).round_()


def _safe(scale: torch.Tensor) -> torch.Tensor:
    """No scale is 0, by which weights would be divided."""
    tiny = torch.full_like(scale, _LEAST_SCALE)
    return torch.where(scale.abs() < _LEAST_SCALE, tiny, scale)
