"""8-bit integers, one scale a token and head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from quantkit.kv.base import KVCodec, Layout, SideCodec
from quantkit.kv.codecs.rounding import rounded_up

LEVELS = 127


class Int8Vectors:
    """``x ≈ codes · scale``: symmetric, codes int8 in [−127, 127], the scale bfloat16."""

    name, hadamard = "int8", False

    def layout(self, dim: int, dtype: torch.dtype) -> Layout:
        """``codes [dim]`` and one ``scale``: dim + 2 bytes."""
        return {"codes": ((dim,), torch.int8), "scale": ((), torch.bfloat16)}

    def shared(self, dim: int, dtype: torch.dtype) -> Layout:
        """Nothing."""
        return {}

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
