"""Rotated vectors in a scalar codebook: TurboQuant, https://arxiv.org/abs/2504.19874.

A rotated vector looks Gaussian whatever it was, so that one codebook fits all. Keys of a head have a large
part in common, which a rotation leaves as large as it was: 64 tokens share a mean, and what differs is coded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field

from quantkit.kv.base import MAX_RESIDUAL, KVCodec, Layout, SideCodec
from quantkit.kv.codecs.kivi import pack, packed_bytes, unpack
from quantkit.support.errors import UsageError

LARGEST, SMALLEST = 2.0**60, 2.0**-60
"""What is farther from 0 is stored as that; a vector whose numbers are smaller is stored as 0."""
CURVES = {2: (0.892891, 0.0506915), 3: (0.471436, 0.0115850), 4: (0.240464, 0.00209768)}
"""Level c of 2^bits is ``u (a + b u²)`` with u = c − (2^bits − 1) / 2: within 0, 0.2 and 2% of the least
squared error that any codebook has for a Gaussian, and nothing to look up."""


def levels(bits: int) -> torch.Tensor:
    """float32 ``[2^bits]``, rising."""
    first, third = CURVES[bits]
    u = torch.arange(2**bits, dtype=torch.float32) - (2**bits - 1) / 2
    return u * (first + third * u * u)


class HadamardVectors:
    """``x ≈ level(codes) · scale + mean``, of vectors that are rotated already.

    Args:
        bits: the bits of a code.
        centered: 64 tokens share a mean; else there is none.
    """

    hadamard = True

    def __init__(self, bits: int, centered: bool) -> None:
        self.bits, self.centered = bits, centered
        self.name = f"hadamard{bits}{'c' if centered else ''}"

    def layout(self, dim: int, dtype: torch.dtype) -> Layout:
        """``codes`` and a bfloat16 ``scale``."""
        if dim % 32:
            raise UsageError("the KV codec rotation needs a head dimension divisible by 32",
                             why=f"this model has {dim}", next="use --kv int8")
        return {"codes": ((packed_bytes(dim, self.bits),), torch.uint8), "scale": ((), torch.bfloat16)}

    def shared(self, dim: int, dtype: torch.dtype) -> Layout:
        """``mean [dim]`` of keys."""
        return {"mean": ((dim,), torch.bfloat16)} if self.centered else {}

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """The nearest levels; the scale is then the best one for them."""
        x = x.float().clamp(-LARGEST, LARGEST)
        parts = {}
        if self.centered:
            parts["mean"] = x.mean(-2).to(torch.bfloat16)
            x = x - parts["mean"].float().unsqueeze(-2)
        size = x.square().mean(-1, keepdim=True).sqrt()
        book = levels(self.bits).to(x.device)
        normal = x / size.clamp(min=SMALLEST)
        codes = torch.bucketize(normal, (book[1:] + book[:-1]) / 2)
        chosen = book[codes]
        scale = (x * chosen).sum(-1) / chosen.square().sum(-1)
        return parts | {"codes": pack(codes.to(torch.uint8), self.bits), "scale": scale.to(torch.bfloat16)}

    def decode(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """float32."""
        book = levels(self.bits).to(parts["codes"].device)
        values = book[unpack(parts["codes"], self.bits).int()] * parts["scale"].float()[..., None]
        return values + parts["mean"].float().unsqueeze(-2) if self.centered else values


class RotationCodec(KVCodec):
    """Keys centered; the newest tokens and the first stay as they were computed.

    Attributes:
        bits: the bits of a code; halves are keys of one bit more than values.
    """

    name: ClassVar[str] = "rotation"
    bits: float = Field(default=4, ge=2, le=4, multiple_of=0.5)
    residual_length: int = Field(default=64, ge=0, le=MAX_RESIDUAL)
    sinks: int = Field(default=1, ge=0, le=MAX_RESIDUAL)

    def keys(self) -> SideCodec:
        return HadamardVectors(int(self.bits + 0.5), centered=True)

    def values(self) -> SideCodec:
        return HadamardVectors(int(self.bits), centered=False)
