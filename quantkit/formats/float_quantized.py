"""compressed-tensors' ``float-quantized``: float8_e4m3fn weights, with quantized activations or without.

``weight`` holds :mod:`~quantkit.formats.e4m3`, the rest is in :mod:`~quantkit.formats.eight_bit`. Without
quantized activations the standard calls the same tensors ``naive-quantized``, and so does ``config.json``.
A scale a tile is the standard's strategy ``block``.
"""

from __future__ import annotations

import torch

from quantkit.formats import e4m3
from quantkit.formats.eight_bit import EightBitFormat


class FloatQuantizedFormat(EightBitFormat):
    """See the module's docstring."""

    name, kind, stored = "float-quantized", "fp", e4m3.DTYPE
    strategies: tuple[str, ...] = ("channel", "tensor", "tile")

    def _swapped(self, codes: torch.Tensor) -> torch.Tensor:
        return codes


FORMAT = FloatQuantizedFormat()
