"""compressed-tensors' ``nvfp4-pack-quantized`` and ``mxfp4-pack-quantized``: 4-bit floating-point weights.

=======================  ==========================  ================================
suffix                   dtype                       shape
=======================  ==========================  ================================
``weight_packed``        uint8                       ``[out, in / 2]``
``weight_scale``         float8_e4m3fn (NVFP4) or    ``[out, in / 16]`` or
                         uint8 (MXFP4's e8m0)        ``[out, in / 32]``
``weight_global_scale``  float32, NVFP4 only         ``[1]``
``input_global_scale``   float32, NVFP4 with         ``[1]``
                         quantized activations only
=======================  ==========================  ================================

:mod:`~quantkit.formats.e2m1` has the bytes. The global scale is what a group's scale was multiplied by before
it was rounded: a weight is ``level * (weight_scale / weight_global_scale)``. Some readers multiply by the
reciprocal of the global scale instead, so ours is a power of 2, with which both give the same bits.

https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

import torch

from quantkit.formats import e2m1, e4m3
from quantkit.formats.base import Codes, QuantizedTensor
from quantkit.formats.fit import FormatBase, Layout
from quantkit.formats.level_values import dequantize
from quantkit.formats.spec import QuantSpec
from quantkit.support.errors import SpecError

NEIGHBORS = (0, 1, -1, 2, -2)
"""Float32 numbers around a reciprocal, counted from it, that may be what it is the reciprocal of."""


class Fp4Format(FormatBase):
    """One of the two layouts.

    Attributes:
        name: the layout's name.
        scale_dtype: the scale dtype of the specs that it holds.
        size: weights in a group.
        stored: dtype of ``weight_scale``.
    """

    quant_method = "compressed-tensors"
    converts_scales = True

    def __init__(self, name: str, scale_dtype: str, size: int, stored: torch.dtype) -> None:
        self.name = name
        self.scale_dtype = scale_dtype
        self.size = size
        self.stored = stored

    def reason_against(self, spec: QuantSpec, shape: tuple[int, int]) -> str | None:
        """Anything but e2m1 in groups of its size with its scales."""
        rows, cols = shape
        if spec.grid != "fp4" or spec.scale_dtype != self.scale_dtype or spec.granularity.size != self.size:
            return (f"{self.name} holds fp4 in groups of {self.size} with {self.scale_dtype} scales, "
                    f"not {spec.label()}")
        if rows < 1 or cols < 1:
            return f"a weight of shape [{rows}, {cols}] is empty; keep it out with method: null"
        if cols % self.size:
            return f"group size {self.size} doesn't divide in_features {cols}; keep it with method: null"
        return None

    def stored_layout(self, spec: QuantSpec, shape: tuple[int, int], dtype: torch.dtype) -> Layout:
        layout: Layout = {
            "weight_packed": (torch.uint8, (shape[0], shape[1] // 2)),
            "weight_scale": (self.stored, (shape[0], shape[1] // self.size))}
        if spec.scale_dtype == "e4m3":
            layout["weight_global_scale"] = (torch.float32, (1,))
        if spec.static_inputs:
            layout["input_global_scale"] = (torch.float32, (1,))
        return layout

    def stored_tensors(self, codes: Codes, layout: Layout, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Raises SpecError without the number that the scales of activations are multiplied by."""
        tensors = {"weight_packed": e2m1.pack(codes.codes)}
        if codes.outer is None:
            tensors["weight_scale"] = e2m1.encode_e8m0(codes.scale)
        else:
            factor = _reciprocal(codes.scale, codes.outer)
            tensors["weight_scale"] = e4m3.encode(codes.scale * factor).view(self.stored)
            tensors["weight_global_scale"] = factor.reshape(1)
        if "input_global_scale" in layout:
            if codes.input_factor is None:
                raise SpecError(f"{self.name} can't hold {codes.spec.label()} without a scale of its inputs",
                                why="what their groups' scales are multiplied by must be calibrated")
            tensors["input_global_scale"] = codes.input_factor.reshape(1).clone()
        return tensors

    def unpack(self, packed: QuantizedTensor) -> Codes:
        return self._codes(packed, packed.tensors["weight_packed"], packed.tensors["weight_scale"])

    def _codes(self, packed: QuantizedTensor, levels: torch.Tensor, stored: torch.Tensor) -> Codes:
        spec, codes = packed.spec, e2m1.unpack(levels)
        if spec.scale_dtype == "e8m0":
            return Codes(spec, codes, e2m1.decode_e8m0(stored))
        factor = packed.tensors["weight_global_scale"].reshape(1, 1)
        inputs = packed.tensors["input_global_scale"].reshape(1, 1) if spec.static_inputs else None
        return Codes(spec, codes, e4m3.decode(stored.view(torch.uint8)) / factor, outer=1 / factor,
                     input_factor=inputs)

    def rows(self, packed: QuantizedTensor, ids: torch.Tensor) -> torch.Tensor:
        """Only these rows of the weight, float32 ``[n, in]``."""
        stored = packed.tensors["weight_scale"].view(torch.uint8)[ids]
        return dequantize(self._codes(packed, packed.tensors["weight_packed"][ids], stored))


def _reciprocal(scale: torch.Tensor, outer: torch.Tensor) -> torch.Tensor:
    """The number whose reciprocal ``outer`` is and by which ``scale`` was divided, float32 ``[1, 1]``.

    Of a power of 2 that is sure. Any other reciprocal belongs to several numbers; the scales tell which.
    """
    near = (1 / outer).view(torch.int32)
    for step in NEIGHBORS:
        factor = (near + step).view(torch.float32)
        if torch.equal(e4m3.nearest_(scale * factor) / factor, scale):
            return factor
    return 1 / outer


NVFP4 = Fp4Format("nvfp4-pack-quantized", "e4m3", 16, e4m3.DTYPE)
MXFP4 = Fp4Format("mxfp4-pack-quantized", "e8m0", 32, torch.uint8)
