"""The scales of grids that a search over extremes alone doesn't find: signed ones, minima, superblocks, and
scales of few bits.

A candidate is a step between levels; weights are put on the nearest levels, and the scale (with a minimum)
that then fits best is a least-squares fit. The best candidate's fit is taken, each group for itself. A
superblock's number is the one with which the groups' scales, as whole multiples, lose least.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from quantkit.formats.spec import QuantSpec
from quantkit.quantization.methods.grid import (
    Grid,
    at_once,
    check_in_range,
    costs_of_groups,
    find_grid,
    multiples,
    rising,
    rounded_minimum,
    rounded_multiple,
    rounded_scale,
    search_factors,
    settle_,
    tile_grid,
)

GRIDS = frozenset({"int", "int minima", "int superblocks", "iq", "fp", "fp tiles", "fp4", "trellis"})
"""The grids that rounding and GPTQ know."""
STEPS = tuple(1.12 - 0.03 * step for step in range(19))
"""Factors on the step between levels that a search tries: from a range that is wider than the weights' on."""
WIDTHS = tuple(1.06 - 0.02 * step for step in range(12))
"""Factors on a superblock's number that are tried."""
_LEAST = 1e-30
E2M1_LARGEST = 6.0
E4M3_LARGEST = 448.0


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
    factors = search_factors(spec) if search else (1.0,)
    if spec.grid == "fp tiles":
        return tile_grid(weight, spec, importance=importance, shrinks=factors)
    if spec.grid == "fp" or (spec.grid == "int" and not spec.signed):
        return find_grid(weight, spec, importance=importance, shrinks=factors)
    shape = spec.scale_shape((weight.shape[0], weight.shape[1]))
    check_in_range(weight, spec)
    groups = weight.reshape(shape[0] * shape[1], -1)
    if spec.scale_dtype == "e4m3" and outer is None:
        outer = _power(weight.abs().max().reshape(1, 1) / (E2M1_LARGEST * E4M3_LARGEST))
    step = max(1, at_once(weight.device) // groups.shape[1])
    costs = None if importance is None else costs_of_groups(importance, shape, groups.shape[1], step)
    fits = []
    for start in range(0, len(groups), step):
        part = groups[start:start + step]
        first = start % shape[1]
        cost = torch.ones_like(part) if costs is None else costs[first:first + len(part)]
        fits.append(_fit_pair(part, cost, spec, search) if spec.minimum
                    else _fit_scale(part, cost, spec, search, outer))
    scale = torch.cat([fit.scale for fit in fits]).reshape(shape)
    bottom = torch.cat([fit.minimum for fit in fits]).reshape(shape) if spec.minimum else None
    if spec.superblock is not None:
        curve = torch.cat([fit.curve for fit in fits]).reshape(shape)
        return _superblocks(scale, bottom, curve, spec, search)
    return _finished(rounded_scale(scale, spec, outer),
                     None if bottom is None else rounded_minimum(bottom, spec), spec, outer)


def _power(value: torch.Tensor) -> torch.Tensor:
    """The least power of 2 that isn't below a positive number. It is divided and multiplied by without
    rounding, so that layouts may store its reciprocal, and a sum of exponents beside it."""
    fraction, exponent = torch.frexp(value.clamp(min=_LEAST))
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
            level = _nearest(groups / scale, spec)
            weighed = level * cost
            curve = (weighed * level).sum(dim=1, keepdim=True)
            slope = (weighed * groups).sum(dim=1, keepdim=True)
            if rounded:
                error = curve * scale.square() - 2 * slope * scale
            else:
                nearest = slope / curve.clamp(min=_LEAST)
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
    scale = (total * mixed - first * sums) / determinant.clamp(min=_LEAST)
    bottom = (sums - scale * first) / total.clamp(min=_LEAST)
    if spec.superblock is not None:
        over = bottom > 0
        scale = torch.where(over, mixed / second.clamp(min=_LEAST), scale)
        bottom = torch.where(over, torch.zeros_like(bottom), bottom)
        determinant = torch.where(over, second, determinant)
    usable = (determinant > 0) & (scale > 0)
    flat = sums / total.clamp(min=_LEAST)  # all weights on one level
    flat = flat.clamp(max=0) if spec.superblock is not None else flat
    return GroupFit(torch.where(usable, scale, torch.full_like(scale, _LEAST)),
                    torch.where(usable, bottom, flat), second)


def _superblocks(scale: torch.Tensor, minimum: torch.Tensor | None, curve: torch.Tensor, spec: QuantSpec,
                 search: bool) -> Grid:
    outer, scale = _multiples(scale, curve, spec, search)
    if minimum is None:
        return _finished(scale, None, spec, outer)
    outer_minimum, depth = _multiples(-minimum, torch.ones_like(curve), spec, search, zero=True)
    return _finished(scale, -depth, spec, outer, outer_minimum)


def _multiples(values: torch.Tensor, curve: torch.Tensor, spec: QuantSpec, search: bool,
               zero: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """A superblock's number ``[out, superblocks]``, and values ``[out, groups]`` as multiples of it, none of
    them 0 unless ``zero``."""
    size = spec.granularity.size or 1
    each = (spec.superblock or size) // size
    parts, weights = values.reshape(-1, each), curve.reshape(-1, each).clamp(min=_LEAST)
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
                1, keepdim=True).clamp(min=_LEAST)
            step = rounded_scale(_safe(torch.where(fit.abs() > _LEAST, fit, step)), spec)
            count = rounded_multiple(parts / step, spec, zero)
            error = (weights * (parts - step * count).square()).sum(1, keepdim=True)
            better = error < least
            least, best = torch.where(better, error, least), torch.where(better, step, best)
    products = best * rounded_multiple(parts / best, spec, zero)
    return best.reshape(shape), products.reshape(values.shape)


def _nearest(quotients: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """Levels less their zero."""
    if spec.kind != "int":
        return settle_(quotients, quotients, spec)
    low = -2.0 ** (spec.bits - 1)
    return quotients.clamp_(low, -low - 1).round_()


def _safe(scale: torch.Tensor) -> torch.Tensor:
    """No scale is 0, by which weights would be divided."""
    tiny = torch.full_like(scale, _LEAST)
    return torch.where(scale.abs() < _LEAST, tiny, scale)


