"""What the plain 8-bit layouts share: a byte a weight, and one scale a row, a tensor or a square of weights.

================  ============  =====================================
suffix            dtype         shape
================  ============  =====================================
``weight``        the layout's  ``[out, in]``
``weight_scale``  the model's   ``[out, 1]``, ``[1]`` or, of squares of
                                ``t`` by ``t``, ``[ceil(out / t), ceil(in / t)]``
================  ============  =====================================

https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from quantkit.formats.base import Codes, QuantizedTensor
from quantkit.formats.dtypes import FLOATS, resolve
from quantkit.formats.fit import require_fit
from quantkit.formats.level_values import dequantize, level_values
from quantkit.formats.spec import QuantSpec


class EightBitFormat(ABC):
    """Base of the layouts.

    Attributes:
        name: of the layout.
        kind: of the specs that it holds.
        strategies: of granularity, that it has a place for.
        stored: dtype of ``weight``.
        suffix: of the scales.
        scales: their dtype; ``None``: the model's.
    """

    quant_method = "compressed-tensors"
    name: str
    kind: str
    strategies: tuple[str, ...] = ("channel", "tensor")
    stored: torch.dtype
    suffix = "weight_scale"
    scales: str | None = None

    def refuses(self, spec: QuantSpec, shape: tuple[int, int]) -> str | None:
        """Anything but 8 bits of its kind, without zero points, and scales of its strategies."""
        rows, cols = shape
        if spec.kind != self.kind or spec.bits != 8:
            other = {"nf": "bnb-nf4", "fp": "float-quantized"}.get(spec.kind, "pack-quantized")
            return f"{self.name} holds {self.kind}8, not {spec.kind}{spec.bits}; use format {other}"
        if not spec.symmetric:
            return f"{self.name} has no zero points; use symmetric: true"
        if spec.granularity.strategy not in self.strategies:
            return (f"{self.name} has no place for scales of {spec.granularity.strategy}s; use strategy "
                    f"{self.strategies[0]}")
        if rows < 1 or cols < 1:
            return f"a weight of shape [{rows}, {cols}] is empty; keep it out with method: null"
        return None

    def layout(self, spec: QuantSpec, shape: tuple[int, int],
               dtype: torch.dtype) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Raises SpecError if it refuses the weight, or for scales of another dtype than the model's."""
        require_fit(self, spec, shape, dtype)
        scales = (1,) if spec.granularity.strategy == "tensor" else spec.scale_shape(shape)
        return {"weight": (self.stored, shape), self.suffix: (FLOATS[self.scales] if self.scales else dtype,
                                                              scales)}

    def pack(self, codes: Codes, dtype: torch.dtype) -> QuantizedTensor:
        """Codes → bytes. Raises SpecError as :meth:`layout` does."""
        spec = resolve(codes.spec, dtype, self)
        shape = (codes.codes.shape[0], codes.codes.shape[1])
        stored, scales = self.layout(spec, shape, dtype)[self.suffix]
        tensors = {"weight": self._swapped(codes.codes).view(self.stored),
                   self.suffix: codes.scale.to(stored).reshape(scales)}
        return QuantizedTensor(self.name, spec, shape, dtype, tensors)

    def unpack(self, packed: QuantizedTensor) -> Codes:
        """Bytes → codes, exactly those that were packed."""
        spec = resolve(packed.spec, packed.dtype, self)
        scale = packed.tensors[self.suffix].to(torch.float32).reshape(spec.scale_shape(packed.shape))
        return Codes(spec, self._swapped(packed.tensors["weight"].view(torch.uint8)), scale)

    def dequantize(self, packed: QuantizedTensor) -> torch.Tensor:
        """The weight in float32 ``[out, in]``."""
        return dequantize(self.unpack(packed))

    def rows(self, packed: QuantizedTensor, ids: torch.Tensor) -> torch.Tensor:
        """Only these rows of the weight, float32 ``[n, in]``."""
        codes = self._swapped(packed.tensors["weight"].view(torch.uint8)[ids])
        scale, size = packed.tensors[self.suffix].to(torch.float32), packed.spec.granularity.size
        values = level_values(Codes(packed.spec, codes, scale))
        if size is not None:
            return values.mul_(scale[ids // size].repeat_interleave(size, dim=1)[:, :packed.shape[1]])
        return values.mul_(scale if scale.dim() == 1 else scale[ids])

    @abstractmethod
    def _swapped(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes ⇄ stored bytes, uint8; the way there is the way back."""
