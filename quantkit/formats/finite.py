"""Whether values are finite, and how large together, asked in pieces: torch takes a whole tensor's memory, or
twice that."""

from __future__ import annotations

import math

import torch

from quantkit.formats import e4m3

_ROWS, _VALUES = 1024, 1 << 20


def all_finite(values: torch.Tensor) -> bool:
    """Whether no value of a floating tensor is NaN or infinite."""
    if values.dtype == e4m3.DTYPE:  # torch neither sums nor compares these
        return not any(map(e4m3.has_nan, values.view(torch.uint8).split(_ROWS)))
    if not values.dim():
        return math.isfinite(float(values))
    if math.isfinite(float(values.sum())):  # one pass, and no NaN or infinity leaves a sum finite
        return True
    return all(bool(torch.isfinite(part).all()) for part in values.split(_ROWS))


def squares(values: torch.Tensor) -> float:
    """The sum of the squares of ``[rows, columns]``, in float64: no finite float32 overflows it."""
    return sum(float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2
               for part in values.split(max(1, _VALUES // max(1, values.shape[1]))))
