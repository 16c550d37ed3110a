"""MLX's affine layout: integer weights of 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128 along the input.

==========  ===========  =====================================================================
suffix      dtype        shape
==========  ===========  =====================================================================
``weight``  uint32       ``[out, in * bits / 32]``: levels along *in*, low bits first, no gaps
``scales``  the model's  ``[out, in / group size]``
``biases``  the model's  the same
==========  ===========  =====================================================================

``w = level * scale + bias``. The bias of a group is its minimum where scales are positive; of a symmetric
weight it is the scale times ``-2 ** (bits - 1)``, which every float dtype holds exactly. A whole zero point
has no exact place in general: ``-zero * scale`` has more digits than the scale.
https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.quantize.html
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quantkit.formats import bits as stream
from quantkit.formats.base import Codes, QuantizedTensor
from quantkit.formats.dtypes import resolve
from quantkit.formats.fit import FormatBase, Layout, reason_against_integers
from quantkit.formats.level_values import dequantize, middle
from quantkit.formats.spec import QuantSpec
from quantkit.support.errors import CheckpointError, SpecError

BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)


class MlxFormat(FormatBase):
    name = "mlx"
    quant_method = "mlx"

    def reason_against(self, spec: QuantSpec, shape: tuple[int, int]) -> str | None:
        """Anything but integers of its bits in its groups, symmetric or with minima."""
        plain = spec.model_copy(update={"minimum": False}) if spec.minimum else spec
        if (reason := reason_against_integers(self.name, plain, shape, ("group",))) is not None:
            return reason
        if spec.bits not in BITS:
            return f"{self.name} holds {', '.join(map(str, BITS))} bits, not {spec.bits}"
        if spec.granularity.size not in GROUPS:
            fitting = [size for size in GROUPS if shape[1] % size == 0]
            remedy = (f"use group size {' or '.join(map(str, fitting))}" if fitting else
                      f"and none divides in_features {shape[1]}; keep the layer with method: null")
            return (f"{self.name} has groups of {', '.join(map(str, GROUPS))}, not of "
                    f"{spec.granularity.size}; {remedy}")
        if not spec.symmetric and not spec.minimum:
            return (f"{self.name} stores a group's minimum in place of a whole zero point; "
                    "use minimum: true beside symmetric: false")
        return None

    def stored_layout(self, spec: QuantSpec, shape: tuple[int, int], dtype: torch.dtype) -> Layout:
        groups = spec.scale_shape(shape)
        return {"weight": (torch.uint32, (shape[0], stream.words(shape[1], spec.bits))),
                "scales": (dtype, groups), "biases": (dtype, groups)}

    def stored_tensors(self, codes: Codes, layout: Layout, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Raises SpecError if a bias is beyond the range of the model's dtype."""
        spec = codes.spec
        bias = codes.scale * -middle(spec) if codes.minimum is None else codes.minimum
        biases = bias.to(dtype)
        if not bool(torch.isfinite(biases).all()):
            raise SpecError(f"{self.name} can't hold a bias of {bias.abs().max().item():.6g}",
                            why=f"it is beyond the range of {dtype}",
                            next="quantize a bfloat16 or float32 version of the model")
        return {"weight": stream.pack(codes.codes, spec.bits).view(torch.uint32),
                "scales": codes.scale.to(dtype), "biases": biases}

    def unpack(self, packed: QuantizedTensor) -> Codes:
        """Words → codes, exactly those that were packed.

        Raises:
            CheckpointError: a symmetric weight has another bias than its scale says.
        """
        return self._codes(packed, packed.tensors)

    def rows(self, packed: QuantizedTensor, ids: torch.Tensor) -> torch.Tensor:
        """Only these rows of the weight, float32 ``[n, in]``."""
        some = {suffix: (tensor.view(torch.int32) if suffix == "weight" else tensor)[ids]
                for suffix, tensor in packed.tensors.items()}
        return dequantize(self._codes(packed, some))

    def _codes(self, packed: QuantizedTensor, tensors: Mapping[str, torch.Tensor]) -> Codes:
        spec = resolve(packed.spec, packed.dtype)
        level = stream.unpack(tensors["weight"].view(torch.int32), spec.bits, packed.shape[1])
        scale, bias = tensors["scales"].to(torch.float32), tensors["biases"].to(torch.float32)
        if spec.minimum:
            return Codes(spec, level, scale, minimum=bias)
        if not torch.equal(bias, scale * -middle(spec)):
            raise CheckpointError("biases are not the scales' symmetric ones",
                                  why="the checkpoint says that the weight is symmetric",
                                  next="copy the checkpoint again from where it came")
        return Codes(spec, level, scale)


FORMAT = MlxFormat()
