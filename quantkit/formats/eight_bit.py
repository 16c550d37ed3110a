"""What compressed-tensors' two plain 8-bit layouts share: a byte a weight, and one scale a row or a tensor.

================  ============  ====================
suffix            dtype         shape
================  ============  ====================
``weight``        the layout's  ``[out, in]``
``weight_scale``  the model's   ``[out, 1]`` or ``[1]``
================  ============  ====================

https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from quantkit.formats.base import Codes, QuantizedTensor
from quantkit.formats.dtypes import resolve
from quantkit.formats.fit import require_fit
from quantkit.formats.level_values import level_values
from quantkit.spec import QuantSpec


class EightBitFormat(ABC):
    """Base of the two layouts.

    Attributes:
        name: of the layout.
        kind: of the specs that it holds.
        stored: dtype of ``weight``.
    """

    quant_method = "compressed-tensors"
    name: str
    kind: str
    stored: torch.dtype

    def refuses(self, spec: QuantSpec, shape: tuple[int, int]) -> str | None:
        """Anything but 8 bits of its kind, without zero points or groups."""
        rows, cols = shape
        if spec.kind != self.kind or spec.bits != 8:
            other = {"nf": "bnb-nf4", "fp": "float-quantized"}.get(spec.kind, "pack-quantized")
            return f"{self.name} holds {self.kind}8, not {spec.kind}{spec.bits}; use format {other}"
        if not spec.symmetric:
            return f"{self.name} has no zero points; use symmetric: true"
        if spec.granularity.strategy not in ("tensor", "channel"):
            return f"{self.name} has no groups; use strategy channel"
        if rows < 1 or cols < 1:
            return f"a weight of shape [{rows}, {cols}] is empty; keep it out with method: null"
        return None

    def layout(self, spec: QuantSpec, shape: tuple[int, int],
               dtype: torch.dtype) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Raises SpecError if it refuses the weight, or for scales of another dtype than the model's."""
        require_fit(self, spec, shape, dtype)
        scales = (1,) if spec.granularity.strategy == "tensor" else (shape[0], 1)
        return {"weight": (self.stored, shape), "weight_scale": (dtype, scales)}

    def pack(self, codes: Codes, dtype: torch.dtype) -> QuantizedTensor:
        """Codes → bytes. Raises SpecError as :meth:`layout` does."""
        spec = resolve(codes.spec, dtype)
        shape = (codes.codes.shape[0], codes.codes.shape[1])
        layout = self.layout(spec, shape, dtype)
        tensors = {"weight": self._swapped(codes.codes).view(self.stored),
                   "weight_scale": codes.scale.to(dtype).reshape(layout["weight_scale"][1])}
        return QuantizedTensor(self.name, spec, shape, dtype, tensors)

    def unpack(self, packed: QuantizedTensor) -> Codes:
        """Bytes → codes, exactly those that were packed."""
        spec = resolve(packed.spec, packed.dtype)
        scale = packed.tensors["weight_scale"].to(torch.float32).reshape(spec.scale_shape(packed.shape))
        return Codes(spec, self._swapped(packed.tensors["weight"].view(torch.uint8)), scale)

    def dequantize(self, packed: QuantizedTensor) -> torch.Tensor:
        """The weight in float32 ``[out, in]``."""
        codes = self.unpack(packed)
        return level_values(codes).mul_(codes.scale)

    def rows(self, packed: QuantizedTensor, ids: torch.Tensor) -> torch.Tensor:
        """Only these rows of the weight, float32 ``[n, in]``."""
        codes = self._swapped(packed.tensors["weight"].view(torch.uint8)[ids])
        scale = packed.tensors["weight_scale"].to(torch.float32)
        return level_values(Codes(packed.spec, codes, scale)).mul_(scale if scale.dim() == 1 else scale[ids])

    @abstractmethod
    def _swapped(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes ⇄ stored bytes, uint8; the way there is the way back."""
