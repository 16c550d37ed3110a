"""bitsandbytes' int8 layout: a signed byte a weight, the largest magnitude of each row beside it.

=================  ========  ==============  ==========================================
suffix             dtype     shape
=================  ========  ==============  ==========================================
``weight``         int8      ``[out, in]``   level − 128
``SCB``            float32   ``[out]``       127 scales
``weight_format``  uint8     ``[]``          0, which means row after row
=================  ========  ==============  ==========================================

``w = weight * SCB * (1 / 127)``, the last as the nearest float32. LLM.int8(),
https://arxiv.org/abs/2208.07339. Its decomposition of outliers happens to activations when a model runs and
is no matter of the file.
"""

from __future__ import annotations

import torch

from quantkit.formats.base import Codes, QuantizedTensor
from quantkit.formats.dtypes import resolve
from quantkit.formats.fit import FormatBase, Layout, reason_against_integers
from quantkit.formats.spec import QuantSpec
from quantkit.support.errors import CheckpointError, SpecError

MIDDLE = 128
INVERSE = 7.874015718698502e-3
"""1 / 127 as float32 has it, which is what bitsandbytes multiplies by."""


class BnbInt8Format(FormatBase):
    name = "bnb-int8"
    quant_method = "bitsandbytes"
    scales = "float32"
    converts_scales = True
    alone = True

    def reason_against(self, spec: QuantSpec, shape: tuple[int, int]) -> str | None:
        """Anything but symmetric 8-bit integers with a scale a row."""
        if (reason := reason_against_integers(self.name, spec, shape, ("channel",))) is not None:
            return reason
        if spec.bits != 8:
            return f"{self.name} holds 8 bits, not {spec.bits}; use format pack-quantized"
        if not spec.symmetric:
            return f"{self.name} has no zero points; use symmetric: true, or format pack-quantized"
        return None

    def stored_layout(self, spec: QuantSpec, shape: tuple[int, int], dtype: torch.dtype) -> Layout:
        return {"weight": (torch.int8, shape), "SCB": (torch.float32, (shape[0],)),
                "weight_format": (torch.uint8, ())}

    def stored_tensors(self, codes: Codes, layout: Layout, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Codes → bytes. Scales of 16 bits come back as they were; of float32 ones, about one in a hundred
        has no maximum that it follows from, and comes back as the float32 beside it.

        Raises:
            SpecError: a scale's maximum overflows float32.
        """
        largest = codes.scale.reshape(-1) * 127
        if not bool(torch.isfinite(largest).all()):
            raise SpecError("127 scales of a row overflow float32", next="format: pack-quantized")
        return {"weight": (codes.codes ^ MIDDLE).view(torch.int8), "SCB": _nearest(largest, codes.scale),
                "weight_format": torch.zeros((), dtype=torch.uint8, device=codes.codes.device)}

    def unpack(self, packed: QuantizedTensor) -> Codes:
        """Bytes → codes. Raises CheckpointError for another order of rows than the plain one."""
        if int(packed.tensors["weight_format"]) != 0:
            raise CheckpointError("weight_format is not 0", why="the rows are tiled for one kind of GPU",
                                  next="save the model again with a recent bitsandbytes")
        scale = (packed.tensors["SCB"] * INVERSE).unsqueeze(1)
        return Codes(resolve(packed.spec, packed.dtype, self),
                     packed.tensors["weight"].contiguous().view(torch.uint8) ^ MIDDLE, scale)

    def dequantize(self, packed: QuantizedTensor) -> torch.Tensor:
        """float32 ``[out, in]``, in the order of operations of bitsandbytes and so with its bits."""
        return packed.tensors["weight"] * packed.tensors["SCB"].unsqueeze(1) * INVERSE


def _nearest(largest: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The one of a maximum and its two neighbors whose scale is nearest."""
    wanted = scale.reshape(-1)
    tried = torch.stack([largest, largest.nextafter(torch.tensor(0.0)),
                         largest.nextafter(torch.tensor(torch.inf))])
    best = (tried * INVERSE - wanted).abs().argmin(dim=0)
    return tried.gather(0, best.unsqueeze(0)).squeeze(0)


FORMAT = BnbInt8Format()
