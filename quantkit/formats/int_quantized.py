"""compressed-tensors' ``int-quantized``: int8 weights for engines that quantize activations too (W8A8).

``weight`` is int8, the level minus 128; the rest is in :mod:`~quantkit.formats.eight_bit`. Weights whose
activations stay as they are (W8A16) belong into ``pack-quantized``: that is where engines look for them.
"""

from __future__ import annotations

import torch

from quantkit.formats.eight_bit import EightBitFormat
from quantkit.formats.spec import QuantSpec


class IntQuantizedFormat(EightBitFormat):
    """See the module's docstring."""

    name, kind, stored = "int-quantized", "int", torch.int8

    def refuses(self, spec: QuantSpec, shape: tuple[int, int]) -> str | None:
        """What :class:`EightBitFormat` refuses, and weights that go without quantized activations."""
        if (reason := super().refuses(spec, shape)) is not None:
            return reason
        if spec.activations is None:
            return (f"{self.name} is for quantized activations; write 'activations: token' into the spec, "
                    "or use format pack-quantized")
        return None

    def _swapped(self, codes: torch.Tensor) -> torch.Tensor:
        return codes ^ 128


FORMAT = IntQuantizedFormat()
