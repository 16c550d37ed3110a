"""AutoAWQ's GEMM layout: 4-bit weights with zero points in int32 words that run along the output.

===========  ========  ======================================================
suffix       dtype     shape
===========  ========  ======================================================
``qweight``  int32     ``[in, out / 8]``
``qzeros``   int32     ``[groups, out / 8]``
``scales``   float16   ``[groups, out]``
===========  ========  ======================================================

``w = (level - zero) * scale``. Nibble ``i`` of a word, from the low end, holds output
``8 * word + ORDER[i]``. AWQ, https://arxiv.org/abs/2306.00978.
"""

from __future__ import annotations

import torch

from quantkit.formats import bits as stream
from quantkit.formats.base import Codes, QuantizedTensor
from quantkit.formats.dtypes import resolve
from quantkit.formats.fit import FormatBase, Layout, reason_against_integers
from quantkit.formats.spec import QuantSpec

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
BACK = (0, 4, 1, 5, 2, 6, 3, 7)


class AwqFormat(FormatBase):
    name = "awq"
    quant_method = "awq"
    scales = "float16"
    alone = True

    def reason_against(self, spec: QuantSpec, shape: tuple[int, int]) -> str | None:
        """Anything but 4-bit integers with zero points, a multiple of eight rows of them."""
        if (reason := reason_against_integers(self.name, spec, shape)) is not None:
            return reason
        if spec.bits != 4:
            return f"{self.name} holds 4 bits, not {spec.bits}; use format gptq"
        if spec.symmetric:
            return f"{self.name} has zero points always; use symmetric: false, or format gptq"
        if shape[0] % 8:
            return (f"out_features {shape[0]} is not a multiple of 8; use format pack-quantized, or keep the "
                    f"layer with method: null")
        return None

    def stored_layout(self, spec: QuantSpec, shape: tuple[int, int], dtype: torch.dtype) -> Layout:
        (rows, cols), groups = shape, spec.scale_shape(shape)[1]
        return {"qweight": (torch.int32, (cols, rows // 8)), "qzeros": (torch.int32, (groups, rows // 8)),
                "scales": (torch.float16, (groups, rows))}

    def stored_tensors(self, codes: Codes, layout: Layout, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        assert codes.zero is not None
        return {"qweight": _pack(codes.codes), "qzeros": _pack(codes.zero),
                "scales": codes.scale.T.to(torch.float16).contiguous()}

    def unpack(self, packed: QuantizedTensor) -> Codes:
        parts = packed.tensors
        return Codes(resolve(packed.spec, packed.dtype, self), _unpack(parts["qweight"]),
                     parts["scales"].T.to(torch.float32).contiguous(), _unpack(parts["qzeros"]))


def _pack(levels: torch.Tensor) -> torch.Tensor:
    """uint8 ``[out, n]`` → int32 ``[n, out / 8]``."""
    across = levels.T.reshape(levels.shape[1], -1, 8)[:, :, list(ORDER)]
    return stream.pack(across.reshape(levels.shape[1], -1), 4)


def _unpack(words: torch.Tensor) -> torch.Tensor:
    """The inverse."""
    flat = stream.unpack(words, 4, words.shape[1] * 8)
    return flat.reshape(words.shape[0], -1, 8)[:, :, list(BACK)].reshape(words.shape[0], -1).T.contiguous()


FORMAT = AwqFormat()
