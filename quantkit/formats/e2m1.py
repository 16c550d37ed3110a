"""4-bit floating point, OCP's e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives,
https://arxiv.org/abs/2310.10537; and e8m0, the powers of 2 in a byte that are its scales there.

Two codes lie in a byte, the earlier one in the low half.
"""

from __future__ import annotations

import torch

LARGEST = 6.0
E8M0_BIAS = 127
E8M0_NAN = 255
_NORMAL = 127 << 23
_MIDDLE = 22 << 23  # adding 1.5 · 2^(e + 22) to a float32 of exponent e leaves it two bits


def nearest_(values: torch.Tensor) -> torch.Tensor:
    """Round float32 in place to the nearest numbers, ties to even; what is beyond 6 becomes 6. A zero loses
    its sign, and NaN stays NaN."""
    values.clamp_(-LARGEST, LARGEST)
    middle = (values.view(torch.int32) & 0x7F800000).clamp_(min=_NORMAL).add_(_MIDDLE)
    large = middle.view(torch.float32).mul_(1.5)
    return values.add_(large).sub_(large)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes uint8 ``[rows, n]``, ``n`` even → bytes ``[rows, n / 2]``."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`pack`."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).reshape(packed.shape[0], -1)


def encode_e8m0(scale: torch.Tensor) -> torch.Tensor:
    """Powers of 2 from 2⁻¹²⁷ to 2¹²⁷, float32 → uint8."""
    return (torch.frexp(scale).exponent - 1 + E8M0_BIAS).to(torch.uint8)


def decode_e8m0(stored: torch.Tensor) -> torch.Tensor:
    """uint8 → float32; 255 is NaN."""
    powers = torch.ldexp(torch.ones(stored.shape, device=stored.device), stored.to(torch.int32) - E8M0_BIAS)
    return powers.masked_fill_(stored == E8M0_NAN, torch.nan)
