"""Floating point as it is, or rounded to bfloat16."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quantkit.kv.base import Layout


class Plain:
    """Stores the vector itself.

    Args:
        name: as registered.
        dtype: what it is rounded to; ``None``: the dtype that it was computed in.
    """

    def __init__(self, name: str, dtype: torch.dtype | None) -> None:
        self.name, self._dtype = name, dtype

    def layout(self, dim: int, dtype: torch.dtype) -> Layout:
        """``values [dim]``."""
        return {"values": ((dim,), self._dtype or dtype)}

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rounded to nearest; what is too large for the dtype becomes its largest number."""
        if self._dtype is None or x.dtype == self._dtype:
            return {"values": x}
        most = min(torch.finfo(self._dtype).max, torch.finfo(x.dtype).max)
        return {"values": x.clamp(-most, most).to(self._dtype)}

    def decode(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """In the stored dtype."""
        return parts["values"]


NONE, BF16 = Plain("none", None), Plain("bf16", torch.bfloat16)
