"""Floating point as it is, or rounded to bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from quantkit.kv.base import KVCodec, Layout, SideCodec


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
