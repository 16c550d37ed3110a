"""6-bit integers: a grid for 32 numbers of a token's vector, four codes in three bytes.

The grid is the one that KIVI uses for values (https://arxiv.org/abs/2402.02750), with 64 levels. A head of 64
numbers takes 56 bytes; int8 takes 66 and bfloat16 128. Keys are rotated first, which spreads the few channels
that are far larger than the others. The first tokens, whose vectors are unlike all others, and the newest
stay as they were computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field

from quantkit.kv.base import MAX_RESIDUAL, KVCodec, Layout, SideCodec
from quantkit.support.errors import UsageError

GROUP = 32
"""Numbers that share a scale and a lowest level."""
LEVELS = 63
LARGEST = 2.0**126
"""What is farther from 0 is stored as that, so that a group's range is finite."""
SMALLEST = 2.0**-126
ROUNDING = 2.0**-8
"""More than bfloat16 rounds off: with so much added, a scale isn't below what it must reach."""


class SixBitVectors:
    """``x ≈ codes · scale + low`` in groups of 32; codes 0 to 63, scale and low bfloat16.

    The scale is rounded up and the lowest level down, so that no number lies outside of its grid.

    Args:
        hadamard: vectors come rotated.
    """

    def __init__(self, hadamard: bool) -> None:
        self.hadamard = hadamard
        self.name = "int6_hadamard" if hadamard else "int6"

    def layout(self, dim: int, dtype: torch.dtype) -> Layout:
        """``codes`` uint8 ``[dim · 6 / 8]``, ``scale`` and ``low`` bfloat16 ``[dim / 32]``.

        Raises:
            UsageError: 32 doesn't divide the head dimension.
        """
        if dim % GROUP:
            raise UsageError(f"the KV codec int6 needs a head dimension divisible by {GROUP}",
                             why=f"this model has {dim}", next="use --kv int8")
        grid = ((dim // GROUP,), torch.bfloat16)
        return {"codes": ((dim * 6 // 8,), torch.uint8), "scale": grid, "low": grid}

    def shared(self, dim: int, dtype: torch.dtype) -> Layout:
        """Nothing: tokens are encoded one by one."""
        return {}

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """``x [..., D]`` in any floating dtype → codes, rounded half to even, and their grid."""
        groups = x.float().clamp(-LARGEST, LARGEST).unflatten(-1, (-1, GROUP))
        low, high = groups.aminmax(dim=-1)
        low = (low - low.abs() * ROUNDING).to(torch.bfloat16)
        scale = ((high - low.float()) * ((1 + ROUNDING) / LEVELS)).clamp_(min=SMALLEST).to(torch.bfloat16)
        steps = (groups - low.float()[..., None]) / scale.float()[..., None]
        codes = steps.round_().clamp_(0, LEVELS).to(torch.int32).flatten(-2)
        return {"codes": _pack(codes), "scale": scale, "low": low}

    def decode(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """float32 ``[..., D]``."""
        groups = _unpack(parts["codes"]).unflatten(-1, (-1, GROUP)).float()
        return (groups * parts["scale"].float()[..., None] + parts["low"].float()[..., None]).flatten(-2)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """int32 ``[..., D]`` below 64 → uint8 ``[..., D · 3 / 4]``: four codes are a number of 24 bits."""
    parts = codes.unflatten(-1, (-1, 4)) << _places(6, codes.device)
    words = parts.sum(-1, keepdim=True, dtype=torch.int32)
    return (words >> _places(8, codes.device) & 255).to(torch.uint8).flatten(-2)


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`_pack`."""
    octets = packed.to(torch.int32).unflatten(-1, (-1, 3)) << _places(8, packed.device)
    return (octets.sum(-1, keepdim=True, dtype=torch.int32) >> _places(6, packed.device) & 63).flatten(-2)


def _places(bits: int, device: torch.device) -> torch.Tensor:
    """Where the parts of a number of 24 bits begin."""
    return torch.arange(0, 24, bits, dtype=torch.int32, device=device)


class Int6Codec(KVCodec):
    """Encodes each token's vector of a head by itself, but for the first tokens and the newest."""

    name: ClassVar[str] = "int6"
    residual_length: int = Field(default=64, ge=0, le=MAX_RESIDUAL)
    sinks: int = Field(default=1, ge=0, le=MAX_RESIDUAL)

    def keys(self) -> SideCodec:
        return SixBitVectors(hadamard=True)

    def values(self) -> SideCodec:
        return SixBitVectors(hadamard=False)
