"""8-bit floating point, e4m3: 4 bits of exponent, 3 of mantissa. https://arxiv.org/abs/2209.05433"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from quantkit.kv.base import KVCodec, Layout, SideCodec
from quantkit.kv.codecs.rounding import LARGEST, rounded_up

MOST = 448.0
"""The largest number of e4m3."""


class Float8Vectors:
    """``x ≈ codes · scale``: codes e4m3, the scale bfloat16."""

    name, hadamard = "fp8", False

    def layout(self, dim: int, dtype: torch.dtype) -> Layout:
        """``codes [dim]`` and one ``scale``: dim + 2 bytes."""
        return {"codes": ((dim,), torch.uint8), "scale": ((), torch.bfloat16)}

    def shared(self, dim: int, dtype: torch.dtype) -> Layout:
        """Nothing."""
        return {}

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rounded half to even; the largest magnitude comes to at most 448."""
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
