"""The plain 8-bit layouts: a byte a weight, and one scale a row, a tensor or a square of weights.

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

from abc import abstractmethod

import torch

from quantkit.formats import e4m3
from quantkit.formats.base import Codes, QuantizedTensor
from quantkit.formats.dtypes import FLOATS, resolve
from quantkit.formats.fit import FormatBase, Layout
from quantkit.formats.level_values import level_values
from quantkit.formats.spec import QuantSpec


class EightBitFormat(FormatBase):
    """Base of the layouts.

    Attributes:
        name: the layout's name.
        kind: the kind of the specs that it holds.
        strategies: the granularities that it has a place for.
        stored: the dtype of ``weight``.
        suffix: how the scales' tensor is called.
    """

    quant_method = "compressed-tensors"
    kind: str
    strategies: tuple[str, ...] = ("channel", "tensor")
    stored: torch.dtype
    suffix = "weight_scale"

    def reason_against(self, spec: QuantSpec, shape: tuple[int, int]) -> str | None:
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

    def stored_layout(self, spec: QuantSpec, shape: tuple[int, int], dtype: torch.dtype) -> Layout:
        scales = (1,) if spec.granularity.strategy == "tensor" else spec.scale_shape(shape)
        return {"weight": (self.stored, shape), self.suffix: (FLOATS[self.scales] if self.scales else dtype,
                                                              scales)}

    def stored_tensors(self, codes: Codes, layout: Layout, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        stored, scales = layout[self.suffix]
        return {"weight": self._swapped(codes.codes).view(self.stored),
                self.suffix: codes.scale.to(stored).reshape(scales)}

    def unpack(self, packed: QuantizedTensor) -> Codes:
        spec = resolve(packed.spec, packed.dtype, self)
        scale = packed.tensors[self.suffix].to(torch.float32).reshape(spec.scale_shape(packed.shape))
        return Codes(spec, self._swapped(packed.tensors["weight"].view(torch.uint8)), scale)

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


class IntQuantizedFormat(EightBitFormat):
    """compressed-tensors' ``int-quantized``: int8 weights, the level minus 128, for engines that quantize
    activations too (W8A8). Weights whose activations stay as they are (W8A16) belong into ``pack-quantized``:
    that is where engines look for them."""

    name = "int-quantized"
    kind = "int"
    stored = torch.int8

    def reason_against(self, spec: QuantSpec, shape: tuple[int, int]) -> str | None:
        """What :class:`EightBitFormat` refuses, and weights that go without quantized activations."""
        if (reason := super().reason_against(spec, shape)) is not None:
            return reason
        if spec.activations is None:
            return (f"{self.name} is for quantized activations; write 'activations: token' into the spec, "
                    "or use format pack-quantized")
        return None

    def _swapped(self, codes: torch.Tensor) -> torch.Tensor:
        return codes ^ 128


INT = IntQuantizedFormat()


class FloatQuantizedFormat(EightBitFormat):
    """compressed-tensors' ``float-quantized``: e4m3 weights, with quantized activations or without. Without
    them the standard calls the same tensors ``naive-quantized``, and so does ``config.json``. A scale a tile
    is the standard's strategy ``block``."""

    name = "float-quantized"
    kind = "fp"
    stored = e4m3.DTYPE
    strategies: tuple[str, ...] = ("channel", "tensor", "tile")

    def _swapped(self, codes: torch.Tensor) -> torch.Tensor:
        return codes


FLOAT = FloatQuantizedFormat()


class FineGrainedFP8Format(FloatQuantizedFormat):
    """DeepSeek's fp8 (``quant_method: fp8``), https://arxiv.org/abs/2412.19437, section 3.3: e4m3 weights
    with a float32 scale for each square in ``weight_scale_inv``, which in spite of its name is what weights
    are multiplied by. Engines round activations to e4m3 with a scale for each ``t`` values of a token."""

    name, quant_method = "fine-grained-fp8", "fp8"
    strategies = ("tile",)
    suffix = "weight_scale_inv"
    scales = "float32"
    alone = True

    def reason_against(self, spec: QuantSpec, shape: tuple[int, int]) -> str | None:
        """The same, and activations as they are: the standard can't say that they aren't rounded."""
        if (reason := super().reason_against(spec, shape)) is None and spec.activations != "group":
            return f"{self.name} is for rounded activations; use activations: group"
        return reason


FINE_GRAINED = FineGrainedFP8Format()
