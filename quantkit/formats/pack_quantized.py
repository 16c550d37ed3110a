"""compressed-tensors' ``pack-quantized``: integer weights of 2 to 8 bits, dense in int32 words.

=====================  ======================  ==========================================
suffix                 dtype                   shape
=====================  ======================  ==========================================
``weight_packed``      int32                   ``[out, ceil(in * bits / 32)]``, along *in*
``weight_scale``       the model's             ``[out, in / g]``, ``[out, 1]`` or ``[1]``
``weight_shape``       int64                   ``[2]``: ``[out, in]``
``weight_zero_point``  int32, asymmetric only  ``[ceil(out * bits / 32), in / g]``, along *out*
=====================  ======================  ==========================================

The file stores the unsigned level, which is the signed code of compressed-tensors plus
``2 ** (bits - 1)``. https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

import torch

from quantkit.formats import bits as stream
from quantkit.formats.base import Codes, QuantizedTensor
from quantkit.formats.dtypes import resolve
from quantkit.formats.fit import FormatBase, Layout, reason_against_integers
from quantkit.formats.level_values import dequantize
from quantkit.formats.spec import QuantSpec


class PackQuantizedFormat(FormatBase):
    name = "pack-quantized"
    quant_method = "compressed-tensors"

    def reason_against(self, spec: QuantSpec, shape: tuple[int, int]) -> str | None:
        """Anything but integers; a group size that doesn't divide *in*; an asymmetric whole tensor."""
        if spec.granularity.strategy == "tensor" and not spec.symmetric:
            return f"{self.name} has no place for one zero point a tensor; use strategy channel or symmetric"
        return reason_against_integers(self.name, spec, shape, ("tensor", "channel", "group"))

    def stored_layout(self, spec: QuantSpec, shape: tuple[int, int], dtype: torch.dtype) -> Layout:
        rows, cols = shape
        scales = spec.scale_shape(shape)
        tensors: Layout = {
            "weight_packed": (torch.int32, (rows, stream.words(cols, spec.bits))),
            "weight_scale": (dtype, (1,) if spec.granularity.strategy == "tensor" else scales),
            "weight_shape": (torch.int64, (2,))}
        if not spec.symmetric:
            tensors["weight_zero_point"] = (torch.int32, (stream.words(rows, spec.bits), scales[1]))
        return tensors

    def stored_tensors(self, codes: Codes, layout: Layout, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        spec, levels = codes.spec, codes.codes
        tensors = {"weight_packed": stream.pack(levels, spec.bits),
                   "weight_scale": codes.scale.to(dtype).reshape(layout["weight_scale"][1]),
                   "weight_shape": torch.tensor(levels.shape, dtype=torch.int64, device=levels.device)}
        if codes.zero is not None:
            tensors["weight_zero_point"] = stream.pack(codes.zero.T.contiguous(), spec.bits).T.contiguous()
        return tensors

    def unpack(self, packed: QuantizedTensor) -> Codes:
        spec, (rows, cols) = resolve(packed.spec, packed.dtype), packed.shape
        scale = packed.tensors["weight_scale"].to(torch.float32).reshape(spec.scale_shape((rows, cols)))
        zero = None
        if not spec.symmetric:
            words = packed.tensors["weight_zero_point"].T.contiguous()
            zero = stream.unpack(words, spec.bits, rows).T.contiguous()
        return Codes(spec, stream.unpack(packed.tensors["weight_packed"], spec.bits, cols), scale, zero)

    def rows(self, packed: QuantizedTensor, ids: torch.Tensor) -> torch.Tensor:
        """Only these rows of the weight, float32 ``[n, in]``."""
        spec, parts = resolve(packed.spec, packed.dtype), packed.tensors
        codes = stream.unpack(parts["weight_packed"][ids], spec.bits, packed.shape[1])
        scale, zero = parts["weight_scale"].to(torch.float32), None
        if not spec.symmetric:
            zero = stream.take(parts["weight_zero_point"].T, spec.bits, ids).T
        return dequantize(Codes(spec, codes, scale.view(1, 1) if scale.dim() == 1 else scale[ids], zero))


FORMAT = PackQuantizedFormat()
