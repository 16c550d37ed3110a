"""8-bit floating point, OCP's e4m3fn: numbers up to 448 with four significant bits, https://arxiv.org/abs/2209.05433.

A sign, four bits of exponent, three of mantissa. The smallest normal number is 2⁻⁶, the smallest of all 2⁻⁹.
There is no infinity; 0x7f and 0xff are NaN.
"""

from __future__ import annotations

import torch

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
_NORMAL = 121 << 23
_MIDDLE = 20 << 23  # adding 1.5 · 2^(e + 20) to a float32 of exponent e leaves it four bits


def encode(values: torch.Tensor) -> torch.Tensor:
    """The nearest codes, uint8, ties to even; what is beyond 448 becomes 448. NaN stays NaN."""
    return values.clamp(-LARGEST, LARGEST).to(DTYPE).view(torch.uint8)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """Codes uint8 → float32."""
    return codes.view(DTYPE).to(torch.float32)


def nearest_(values: torch.Tensor) -> torch.Tensor:
    """Round float32 in place to what :func:`encode` would make of it, many times faster than through codes.
    A zero loses its sign."""
    values.clamp_(-LARGEST, LARGEST)
    middle = (values.view(torch.int32) & 0x7F800000).clamp_(min=_NORMAL).add_(_MIDDLE)
    large = middle.view(torch.float32).mul_(1.5)
    return values.add_(large).sub_(large)


def has_nan(codes: torch.Tensor) -> bool:
    """Whether a code uint8 is NaN's."""
    return bool((codes & 0x7F == 0x7F).any())
