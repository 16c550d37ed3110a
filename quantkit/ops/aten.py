"""torch's own CPU kernels for 8-bit and 4-bit integer weights.

They multiply straight from the codes, which is what makes decoding fast: bytes read are time. With
many rows of activations the reference overtakes them (float32 matrix products reach twice their
rate), so they decline prefill.
"""

from __future__ import annotations

from typing import Any

import torch

from quantkit.formats.base import QuantizedTensor
from quantkit.ops.dispatch import KernelQuery, codes_of

INT8_K = 16
"""torch's int8 loop steps by 16 and misreads (or crashes on) what is left over."""
INT4_N = 16
"""torch packs int4 rows in blocks of 16."""
INT4_GROUPS = (32, 64, 128, 256)
_MIDDLE = 8


def _common(query: KernelQuery, op: str) -> str | None:
    """Reasons that hold for both kernels."""
    if query.op != "linear":
        return f"implements linear, not {query.op}"
    if query.device != "cpu":
        return f"runs on cpu, not {query.device}"
    if query.dtype != torch.bfloat16:
        return f"takes bfloat16 activations, not {str(query.dtype).removeprefix('torch.')}"
    if query.phase != "decode":
        return "slower than dequantizing once for many rows"
    if query.spec.kind != "int":
        return f"multiplies integers, not {query.spec.kind}"
    if query.spec.scale_dtype not in ("model", "bfloat16"):
        return f"keeps scales in bfloat16, which would round {query.spec.scale_dtype} ones"
    if not hasattr(torch.ops.aten, op):
        return f"this torch has no {op}"
    return None


class Int8:
    """``torch._weight_int8pack_mm``: int8 codes, one scale a row, float32 sums."""

    name = "aten-int8"
    order = 100

    def declines(self, query: KernelQuery) -> str | None:
        """Anything but 8-bit symmetric weights with one scale a row (or a tensor)."""
        if (reason := _common(query, "_weight_int8pack_mm")) is not None:
            return reason
        spec = query.spec
        if spec.bits != 8:
            return f"multiplies 8-bit weights, not {spec.bits}-bit"
        if not spec.symmetric:
            return "has no zero point"
        if spec.granularity.strategy not in ("channel", "tensor"):
            return f"takes one scale a row, not {spec.granularity}"
        if query.k % INT8_K:
            return f"needs in_features divisible by {INT8_K}, not {query.k}"
        return None

    def prepare(self, weight: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int8 ``[n, k]`` and bfloat16 scales ``[n]``."""
        codes = codes_of(weight)
        signed = (codes.codes ^ 128).view(torch.int8)
        return signed.contiguous(), codes.scale.expand(weight.shape[0], 1).reshape(-1).to(torch.bfloat16)

    def run(self, x: torch.Tensor, prepared: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """``x [m, k]`` → ``[m, n]``, bfloat16."""
        if x.shape[0] == 0:
            return x.new_empty(0, prepared[0].shape[0])
        return torch._weight_int8pack_mm(x.contiguous(), *prepared)


class Int4:
    """``torch.ops.aten._weight_int4pack_mm_for_cpu``: ``(q - 8) * s + z`` with bfloat16 s and z a group.

    An asymmetric weight has ``z = (8 - zero) * s``, rounded to bfloat16.
    """

    name = "aten-int4"
    order = 100

    def declines(self, query: KernelQuery) -> str | None:
        """Anything but 4-bit weights in groups of 32, 64, 128 or 256."""
        if (reason := _common(query, "_weight_int4pack_mm_for_cpu")) is not None:
            return reason
        spec = query.spec
        if spec.bits != 4:
            return f"multiplies 4-bit weights, not {spec.bits}-bit"
        if spec.granularity.strategy != "group" or spec.granularity.size not in INT4_GROUPS:
            return f"takes groups of {', '.join(map(str, INT4_GROUPS))}, not {spec.granularity}"
        if query.n % INT4_N:
            return f"needs out_features divisible by {INT4_N}, not {query.n}"
        if query.k % spec.granularity.size:
            return f"needs in_features divisible by {spec.granularity.size}, not {query.k}"
        return None

    def prepare(self, weight: QuantizedTensor) -> tuple[torch.Tensor, int, torch.Tensor]:
        """uint8 ``[n, k / 2]`` in torch's order, the group size, bfloat16 ``[k / group, n, 2]``."""
        codes = codes_of(weight)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.codes.to(torch.int32), 1)
        offset = torch.zeros_like(codes.scale)
        if codes.zero is not None:
            offset = (_MIDDLE - codes.zero.to(torch.float32)) * codes.scale
        pairs = torch.stack((codes.scale.T, offset.T), dim=-1).to(torch.bfloat16).contiguous()
        size = codes.spec.granularity.size
        assert size is not None
        return packed, size, pairs

    def run(self, x: torch.Tensor, prepared: tuple[torch.Tensor, int, torch.Tensor]) -> torch.Tensor:
        """``x [m, k]`` → ``[m, n]``, bfloat16."""
        packed, size, pairs = prepared
        if x.shape[0] == 0:
            return x.new_empty(0, packed.shape[0])
        y: Any = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), packed, size, pairs)
        assert isinstance(y, torch.Tensor)
        return y


INT8, INT4 = Int8(), Int4()
