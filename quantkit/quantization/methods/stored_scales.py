"""The numbers that scales and minima can be once they are stored."""

from __future__ import annotations

import torch

from quantkit.formats.dtypes import scale_dtype
from quantkit.formats.e4m3 import LARGEST, nearest_
from quantkit.formats.spec import QuantSpec

SMALLEST_E4M3 = 2.0**-9
LEAST_EXPONENT = -127
MOST_EXPONENT = 127
"""The exponents of ``e8m0``."""


def smallest(dtype: torch.dtype) -> float:
    """The smallest scale of a dtype: its least normal number, or for float16, whose range is short, its
    least number."""
    info = torch.finfo(dtype)
    return info.tiny * info.eps if dtype == torch.float16 else info.tiny


def round_scale(scale: torch.Tensor, zero: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """Round to the stored dtype, never to zero, and never so far that a level overflows that dtype."""
    dtype = scale_dtype(spec)
    info = torch.finfo(dtype)
    farthest = torch.full_like(zero, LARGEST) if spec.kind == "fp" else torch.maximum(
        zero, 2**spec.bits - 1 - zero)
    rounded = scale.clamp(min=smallest(dtype)).to(dtype).float()
    over = rounded * farthest > info.max
    if bool(over.any()):
        # one step below the quotient, so that rounding it can't come out above
        rounded = torch.where(over, (info.max / farthest * (1 - info.eps)).to(dtype).float(), rounded)
    return rounded


def rounded_scale(scale: torch.Tensor, spec: QuantSpec, outer: torch.Tensor | None = None) -> torch.Tensor:
    """The nearest scales (or minima, or superblocks' numbers) that are stored; never 0, with their sign.

    Args:
        scale: float32 of any shape.
        spec: says in what they are stored.
        outer: the number that ``e4m3`` scales are multiples of.
    """
    if spec.scale_dtype == "e4m3":
        assert outer is not None
        return nearest_((scale / outer).clamp_(min=SMALLEST_E4M3)) * outer
    if spec.scale_dtype == "e8m0":
        fraction, exponent = torch.frexp(scale.clamp(min=2.0**LEAST_EXPONENT))
        exponent = exponent - (fraction < 0.75).int()  # halfway between two powers, to the larger
        return torch.ldexp(torch.ones_like(scale), exponent.clamp_(LEAST_EXPONENT, MOST_EXPONENT))
    dtype = scale_dtype(spec)
    size = scale.abs().clamp_(smallest(dtype), torch.finfo(dtype).max).to(dtype).float()
    return torch.where(scale < 0, -size, size)


def rounded_minimum(minimum: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """The nearest minima that are stored; they may be 0."""
    dtype = scale_dtype(spec)
    limit = torch.finfo(dtype).max
    return minimum.clamp(-limit, limit).to(dtype).float()


def multiples(spec: QuantSpec) -> tuple[float, float]:
    """The least and the largest whole number that a superblock's number is multiplied by."""
    assert spec.scale_bits is not None
    if spec.minimum:
        return 0.0, 2.0**spec.scale_bits - 1
    return -2.0 ** (spec.scale_bits - 1), 2.0 ** (spec.scale_bits - 1) - 1


def rounded_multiple(quotients: torch.Tensor, spec: QuantSpec, zero: bool = False) -> torch.Tensor:
    """The nearest whole numbers that there are; 0 only if ``zero``, since weights are divided by scales."""
    count = quotients.round().clamp_(*multiples(spec))
    return count if zero else torch.where(count == 0, torch.where(quotients < 0, -1.0, 1.0), count).clamp_(
        *multiples(spec))
