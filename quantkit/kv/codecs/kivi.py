"""2- to 4-bit integers, keys by channel, values by token: KIVI, https://arxiv.org/abs/2402.02750.

A channel of a head's keys is about equally large in all tokens, and some are far larger than others; values
have no such channels. So 32 tokens share the grid of a channel of keys, 32 channels that of a token's value.
Codes lie in bytes, lowest first; those of 3 bits are all low pairs, then all high bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field

from quantkit.kv.base import MAX_RESIDUAL, PAGE, KVCodec, Layout, SideCodec
from quantkit.kv.codecs.per_token import LARGEST, rounded_down, rounded_up
from quantkit.support.errors import UsageError


def packed_bytes(dim: int, bits: int) -> int:
    """Bytes that ``dim`` codes take; 8 divides ``dim``."""
    return dim * bits // 8


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 ``[..., D]`` → uint8 ``[..., D · bits / 8]``."""
    if bits == 3:
        return torch.cat((_pack(codes & 3, 2), _pack(codes >> 2, 1)), -1)
    return _pack(codes, bits)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of :func:`pack`."""
    if bits == 3:
        pairs = packed.shape[-1] // 3 * 2
        return _unpack(packed[..., :pairs], 2) | _unpack(packed[..., pairs:], 1) << 2
    return _unpack(packed, bits)


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    places = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (codes.unflatten(-1, (-1, 8 // bits)) << places).sum(-1, dtype=torch.uint8)


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    places = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return (packed[..., None] >> places & 2**bits - 1).flatten(-2)


GROUP = 32
"""Numbers that share a grid."""


class GroupedGrid:
    """``x ≈ codes · scale + low`` in groups of 32, scale and low bfloat16.

    Args:
        bits: the bits of a code.
        channels: groups lie along tokens, a grid for each channel; else along channels, one for each token.
    """

    hadamard = False

    def __init__(self, bits: int, channels: bool) -> None:
        self.bits, self.channels = bits, channels
        self.name = f"{'channel' if channels else 'token'}{bits}"

    def layout(self, dim: int, dtype: torch.dtype) -> Layout:
        """``codes``, and of values ``scale`` and ``low [dim / 32]``."""
        if dim % GROUP:
            raise UsageError(f"the KV codec int{self.bits} needs a head dimension divisible by {GROUP}",
                             why=f"this model has {dim}", next="use --kv int8")
        codes = {"codes": ((packed_bytes(dim, self.bits),), torch.uint8)}
        grid = dict.fromkeys(("scale", "low"), ((dim // GROUP,), torch.bfloat16))
        return codes if self.channels else codes | grid

    def shared(self, dim: int, dtype: torch.dtype) -> Layout:
        """``scale`` and ``low [2, dim]`` of keys."""
        grid = dict.fromkeys(("scale", "low"), ((PAGE // GROUP, dim), torch.bfloat16))
        return grid if self.channels else {}

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rounded half to even; the lowest is rounded down, the scale up: nothing is outside."""
        at = -2 if self.channels else -1
        groups = x.float().clamp(-LARGEST, LARGEST).unflatten(at, (-1, GROUP))
        low = rounded_down(groups.amin(at))
        levels = 2**self.bits - 1
        scale = rounded_up((groups.amax(at) - low.float()) / levels)
        steps = (groups - low.float().unsqueeze(at)) * (1 / scale.float()).unsqueeze(at)
        codes = steps.round_().clamp_(0, levels).to(torch.uint8).flatten(at - 1, at)
        return {"codes": pack(codes, self.bits), "scale": scale, "low": low}

    def decode(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """float32."""
        at = -2 if self.channels else -1
        codes = unpack(parts["codes"], self.bits).unflatten(at, (-1, GROUP)).float()
        scale, low = (parts[name].float().unsqueeze(at) for name in ("scale", "low"))
        return codes.mul_(scale).add_(low).flatten(at - 1, at)


class KiviCodec(KVCodec):
    """Keys by channel, values by token; the newest tokens and the first stay as they were computed."""

    bits: ClassVar[int]
    residual_length: int = Field(default=64, ge=0, le=MAX_RESIDUAL)
    sinks: int = Field(default=1, ge=0, le=MAX_RESIDUAL)

    def keys(self) -> SideCodec:
        return GroupedGrid(self.bits, channels=True)

    def values(self) -> SideCodec:
        return GroupedGrid(self.bits, channels=False)


class Int4Codec(KiviCodec):
    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4


class Int3Codec(KiviCodec):
    name: ClassVar[str] = "int3"
    bits: ClassVar[int] = 3


class Int2Codec(KiviCodec):
    name: ClassVar[str] = "int2"
    bits: ClassVar[int] = 2
