"""Grids whose scales are each of a square of weights: DeepSeek's fp8, https://arxiv.org/abs/2412.19437.

Squares at the right and lower edge of a weight may be cut. So that methods need not know about squares, a
grid here has a scale for every weight, as if each were a group by itself; codes have one a square.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quantkit.formats.level_values import spread_tiles
from quantkit.formats.spec import QuantSpec
from quantkit.quantization.methods.grid import Grid, at_once, require_in_range, search_groups


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
    require_in_range(weight, spec)
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


def sums_of_tiles(values: torch.Tensor, size: int) -> torch.Tensor:
    """The sum over the rows of each row's squares, in the place of every one, float32 ``[out]``."""
    sums = F.pad(values, (0, -len(values) % size)).view(-1, size).sum(dim=1)
    return sums.repeat_interleave(size)[:len(values)]
