"""Our own GPU kernels for quantized weights, as the dispatch sees them: int8, int4 in groups, NF4.

One kernel serves decoding and prefill: it cuts its work by the number of rows. Weights are repacked once
into the order in which the tensor cores want them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quantkit.formats.base import Codes, QuantizedTensor
from quantkit.ops import gpu
from quantkit.ops.dispatch import KernelQuery

GROUPS = (32, 64)
BLOCK = 64


class TritonLinear:
    """One of the kernels.

    Args:
        name: as the dispatch prints it.
        refuses: why it doesn't take a query whose device and dtype fit.
        pack: codes → the kernel's weight.
        multiply: ``(x [m, k], weight)`` → ``[m, n]``.
    """

    order = 50

    def __init__(self, name: str, refuses: Callable[[KernelQuery], str | None], pack: Callable[[Codes], Any],
                 multiply: Callable[[torch.Tensor, Any], torch.Tensor]) -> None:
        self.name, self._refuses, self._pack, self._multiply = name, refuses, pack, multiply

    def declines(self, query: KernelQuery) -> str | None:
        """Another operation, device, dtype or kind of weight."""
        if query.op != "linear":
            return f"implements linear, not {query.op}"
        return gpu.unavailable(query.device, query.dtype) or self._refuses(query)

    def prepare(self, weight: QuantizedTensor) -> Any:
        """The weight in the kernel's own order."""
        from quantkit.plugins import registry

        return self._pack(registry("formats").get(weight.format).unpack(weight))

    def run(self, x: torch.Tensor, prepared: Any) -> torch.Tensor:
        """``x [m, k]`` → ``[m, n]``, x's dtype."""
        return self._multiply(x, prepared)


def _refuses_int8(query: KernelQuery) -> str | None:
    spec = query.spec
    if spec.kind != "int" or spec.bits != 8:
        return f"multiplies int8, not {spec.kind}{spec.bits}"
    if not spec.symmetric:
        return "has no zero point"
    if spec.granularity.strategy not in ("channel", "tensor"):
        return f"takes one scale a row, not {spec.granularity}"
    return None


def _pack_int8(codes: Codes) -> Any:
    from quantkit_kernels.triton.w8a16 import pack

    scale = codes.scale.expand(codes.codes.shape[0], 1).reshape(-1)
    return pack((codes.codes ^ 128).view(torch.int8), scale)


def _int8(x: torch.Tensor, weight: Any) -> torch.Tensor:
    from quantkit_kernels.triton.w8a16 import w8a16

    return w8a16(x, weight)


def _refuses_int4(query: KernelQuery) -> str | None:
    spec, size = query.spec, query.spec.granularity.size
    if spec.kind != "int" or spec.bits != 4:
        return f"multiplies int4, not {spec.kind}{spec.bits}"
    if spec.granularity.strategy != "group" or size is None:
        return f"takes groups, not {spec.granularity}"
    if size not in GROUPS and size % 128:
        return f"takes groups of 32, 64 or a multiple of 128, not {size}"
    if not spec.symmetric and spec.scale_dtype == "float32":
        return "keeps asymmetric scales in 16 bits, which would round float32 ones"
    return None


def _pack_int4(codes: Codes) -> Any:
    from quantkit_kernels.triton.w4a16 import pack

    return pack(codes.codes, codes.scale, codes.zero)


def _int4(x: torch.Tensor, weight: Any) -> torch.Tensor:
    from quantkit_kernels.triton.w4a16 import w4a16

    return w4a16(x, weight)


def _refuses_nf4(query: KernelQuery) -> str | None:
    spec = query.spec
    if spec.kind != "nf":
        return f"multiplies NF4, not {spec.kind}{spec.bits}"
    if spec.granularity.size != BLOCK:
        return f"takes blocks of {BLOCK}, not {spec.granularity.size}"
    return f"needs in_features divisible by {BLOCK}, not {query.k}" if query.k % BLOCK else None


def _pack_nf4(codes: Codes) -> Any:
    from quantkit_kernels.triton.nf4 import pack

    return pack(codes.codes, codes.scale)


def _nf4(x: torch.Tensor, weight: Any) -> torch.Tensor:
    from quantkit_kernels.triton.nf4 import nf4

    return nf4(x, weight)


INT8 = TritonLinear("triton-w8a16", _refuses_int8, _pack_int8, _int8)
INT4 = TritonLinear("triton-w4a16", _refuses_int4, _pack_int4, _int4)
NF4 = TritonLinear("triton-nf4", _refuses_nf4, _pack_nf4, _nf4)
