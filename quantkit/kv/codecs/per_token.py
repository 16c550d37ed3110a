"""Codecs that store each token's vector by itself: as it is, rounded to bfloat16, or in 8 bits.

8-bit codes are integers or e4m3 floating point (https://arxiv.org/abs/2209.05433), with one bfloat16 scale
for each token and head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from quantkit.kv.base import KVCodec, Layout, SideCodec

LARGEST = 2.0**126
"""What is farther from 0 is stored as that: 15 steps from its negative to it are still finite."""


def rounded_up(x: torch.Tensor) -> torch.Tensor:
    """float32, not negative → the smallest normal bfloat16 that isn't below it (at most the largest finite).

    Never 0 nor denormal, so that one over it is finite.
    """
    kind, near = torch.finfo(torch.bfloat16), x.to(torch.bfloat16)
    above = (near.view(torch.int16) + 1).view(torch.bfloat16)
    return torch.where(near.float() < x, above, near).clamp_(kind.tiny, kind.max)


def rounded_down(x: torch.Tensor) -> torch.Tensor:
    """float32 → the largest bfloat16 that isn't above it."""
    return -_signed_up(-x)


def _signed_up(x: torch.Tensor) -> torch.Tensor:
    near = x.to(torch.bfloat16)
    bits = near.view(torch.int16)
    # towards +∞: the next pattern for a positive number, the one before for a negative, from ±0 the least
    step = torch.where(near > 0, bits + 1, torch.where(near < 0, bits - 1, 1))
    above = step.to(torch.int16).view(torch.bfloat16)
    return torch.where(near.float() < x, above, near)


LEVELS = 127


class ScaledVectors:
    """``x ≈ codes · scale``, the scale bfloat16."""

    hadamard = False
    stored: torch.dtype

    def layout(self, dim: int, dtype: torch.dtype) -> Layout:
        """``codes [dim]`` and one ``scale``: dim + 2 bytes."""
        return {"codes": ((dim,), self.stored), "scale": ((), torch.bfloat16)}

    def shared(self, dim: int, dtype: torch.dtype) -> Layout:
        """Tokens are encoded alone: they share nothing."""
        return {}


class Int8Vectors(ScaledVectors):
    """Symmetric integers in [−127, 127]."""

    name, stored = "int8", torch.int8

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rounded half to even; the scale is rounded up, so that nothing is clipped."""
        x = x.float()
        scale = rounded_up(x.abs().amax(-1) / LEVELS)
        codes = (x * (1 / scale.float())[..., None]).round_().clamp_(-LEVELS, LEVELS)
        return {"codes": codes.to(torch.int8), "scale": scale}

    def decode(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """float32: one more rounding to half precision would cost as much as the codes themselves."""
        return parts["codes"].float().mul_(parts["scale"].float()[..., None])


class Int8Codec(KVCodec):
    """Encodes each token's vector of a head by itself."""

    name: ClassVar[str] = "int8"

    def keys(self) -> SideCodec:
        return Int8Vectors()


MOST = 448.0
"""The largest number of e4m3."""


class Float8Vectors(ScaledVectors):
    """e4m3 numbers in bytes."""

    name, stored = "fp8", torch.uint8

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Codes are rounded half to even; the largest magnitude comes to at most 448."""
        x = x.float().clamp(-LARGEST, LARGEST)
        scale = rounded_up(x.abs().amax(-1) / MOST)
        codes = (x * (1 / scale.float())[..., None]).clamp_(-MOST, MOST).to(torch.float8_e4m3fn)
        return {"codes": codes.view(torch.uint8), "scale": scale}

    def decode(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """float32."""
        return parts["codes"].view(torch.float8_e4m3fn).float().mul_(parts["scale"].float()[..., None])


class Fp8Codec(KVCodec):
    """Encodes each token's vector of a head by itself."""

    name: ClassVar[str] = "fp8"

    def keys(self) -> SideCodec:
        return Float8Vectors()


class PlainVectors:
    """Stores the vector itself.

    Args:
        dtype: vectors are rounded to it; ``None`` stands for the dtype that they were computed in.
    """

    hadamard = False

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self.name = "none" if dtype is None else "bf16"

    def layout(self, dim: int, dtype: torch.dtype) -> Layout:
        """``values [dim]``."""
        return {"values": ((dim,), self._dtype or dtype)}

    def shared(self, dim: int, dtype: torch.dtype) -> Layout:
        return {}

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rounded to nearest; what is too large for the dtype becomes its largest number."""
        if self._dtype is None or x.dtype == self._dtype:
            return {"values": x}
        limit = min(torch.finfo(self._dtype).max, torch.finfo(x.dtype).max)
        return {"values": x.clamp(-limit, limit).to(self._dtype)}

    def decode(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The vectors in the stored dtype."""
        return parts["values"]


class PlainCodec(KVCodec):
    """What the model computes, in its dtype."""

    name: ClassVar[str] = "none"

    def keys(self) -> SideCodec:
        return PlainVectors(None)


class BFloat16Codec(KVCodec):
    """bfloat16, whatever the model computes in."""

    name: ClassVar[str] = "bf16"

    def keys(self) -> SideCodec:
        return PlainVectors(torch.bfloat16)
