"""6-bit integers: a grid for 32 numbers of a token's vector, four codes in three bytes.

The grid is the one that KIVI uses for values (https://arxiv.org/abs/2402.02750), with 64 levels. Every token
is encoded alone, so nothing has to wait unencoded. A head of 64 numbers takes 56 bytes; int8 takes 66 and
bfloat16 128.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from quantkit.errors import UsageError
from quantkit.kv.base import KVCodec, Layout, SideCodec

GROUP = 32
"""Numbers that share a scale and a lowest level."""
LEVELS = 63
LARGEST = 2.0**126
"""What is farther from 0 is stored as that, so that a group's range is finite."""


class SixBitVectors:
    """``x ≈ codes · scale + low`` in groups of 32; codes 0 to 63, scale and low bfloat16.

    The scale is rounded up and the lowest level down, so that no number lies outside of its grid.
    """

    name, hadamard = "int6", False

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
        low = _rounded_down(groups.amin(-1))
        scale = _rounded_up((groups.amax(-1) - low.float()) / LEVELS)
        steps = (groups - low.float()[..., None]) / scale.float()[..., None]
        codes = steps.round_().clamp_(0, LEVELS).to(torch.int32).flatten(-2)
        return {"codes": _pack(codes), "scale": scale, "low": low}

    def decode(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """float32 ``[..., D]``."""
        groups = _unpack(parts["codes"]).unflatten(-1, (-1, GROUP)).float()
        return (groups * parts["scale"].float()[..., None] + parts["low"].float()[..., None]).flatten(-2)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """int32 ``[..., D]`` below 64 → uint8 ``[..., D · 3 / 4]``: four codes are a number of 24 bits."""
    four = codes.unflatten(-1, (-1, 4))
    word = four[..., 0] | four[..., 1] << 6 | four[..., 2] << 12 | four[..., 3] << 18
    return torch.stack([word & 255, word >> 8 & 255, word >> 16], -1).flatten(-2).to(torch.uint8)


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`_pack`."""
    three = packed.to(torch.int32).unflatten(-1, (-1, 3))
    word = three[..., 0] | three[..., 1] << 8 | three[..., 2] << 16
    return torch.stack([word >> shift & 63 for shift in (0, 6, 12, 18)], -1).flatten(-2)


def _rounded_up(x: torch.Tensor) -> torch.Tensor:
    """float32, not negative → the smallest normal bfloat16 that isn't below it."""
    kind, near = torch.finfo(torch.bfloat16), x.to(torch.bfloat16)
    above = (near.view(torch.int16) + 1).view(torch.bfloat16)
    return torch.where(near.float() < x, above, near).clamp_(kind.tiny, kind.max)


def _rounded_down(x: torch.Tensor) -> torch.Tensor:
    """float32 → the largest bfloat16 that isn't above it."""
    near = x.to(torch.bfloat16)
    bits = near.view(torch.int16)
    # towards −∞: the pattern before of a positive number, the next of a negative one, from ±0 the least below
    least = torch.tensor(-32767, dtype=torch.int16)
    below = torch.where(near > 0, bits - 1, torch.where(near < 0, bits + 1, least)).to(torch.int16)
    return torch.where(near.float() > x, below.view(torch.bfloat16), near)


class Int6Codec(KVCodec):
    """Encodes each token's vector of a head by itself."""

    name: ClassVar[str] = "int6"

    def keys(self) -> SideCodec:
        return SixBitVectors()
