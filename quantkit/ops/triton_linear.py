"""Triton's matrix products for 8-bit, 4-bit and NF4 weights, as kernels that the dispatch chooses from.

A weight is repacked once, from its codes; whatever format it is stored in. The kernels themselves are in
``quantkit_kernels.triton``; triton is imported when a weight is first prepared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quantkit.formats.base import QuantizedTensor
from quantkit.ops import gpu
from quantkit.ops.dispatch import KernelQuery, codes_of

if TYPE_CHECKING:
    from quantkit_kernels.triton.matmul import Packed

GROUPS = (32, 64)
"""Group sizes besides the multiples of 128."""
NF4_BLOCK = 64


def _common(query: KernelQuery, kind: str, bits: int) -> str | None:
    """Reasons that hold for all of them."""
    if query.op != "linear":
        return f"implements linear, not {query.op}"
    if (reason := gpu.unavailable(query.device, query.dtype)) is not None:
        return reason
    if query.device == "cuda" and query.dtype == torch.float32:
        return "takes 16-bit activations, not float32"
    if query.spec.kind != kind:
        return f"multiplies {kind}, not {query.spec.kind}"
    if query.spec.bits != bits:
        return f"multiplies {bits}-bit weights, not {query.spec.bits}-bit"
    if query.spec.activations:
        return "leaves activations as they are"
    return None


class W8A16:
    """int8 weights with one scale a row."""

    name = "triton-w8a16"
    order = 50

    def declines(self, query: KernelQuery) -> str | None:
        """Anything but 8-bit symmetric weights with one scale a row (or a tensor)."""
        if (reason := _common(query, "int", 8)) is not None:
            return reason
        if not query.spec.symmetric:
            return "has no zero point"
        if query.spec.granularity.strategy not in ("channel", "tensor"):
            return f"takes one scale a row, not {query.spec.granularity}"
        return None

    def prepare(self, weight: QuantizedTensor) -> Packed:
        """Codes in the tensor core's order."""
        from quantkit_kernels.triton.w8a16 import pack

        codes = codes_of(weight)
        signed = (codes.codes ^ 128).view(torch.int8)
        return pack(signed, codes.scale.expand(weight.shape[0], 1).reshape(-1))

    def run(self, x: torch.Tensor, prepared: Packed) -> torch.Tensor:
        """``x [m, k]`` → ``[m, n]`` in x's dtype."""
        from quantkit_kernels.triton.w8a16 import w8a16

        return w8a16(x, prepared)


class W4A16:
    """int4 weights in groups, with or without zero points."""

    name = "triton-w4a16"
    order = 50

    def declines(self, query: KernelQuery) -> str | None:
        """Anything but 4-bit weights in groups of 32, 64 or a multiple of 128, or with a scale a row."""
        if (reason := _common(query, "int", 4)) is not None:
            return reason
        spec = query.spec
        strategy, size = spec.granularity.strategy, spec.granularity.size or 0
        if strategy == "group" and size not in GROUPS and size % 128:
            return f"takes groups of 32, 64 or a multiple of 128, not {spec.granularity}"
        if strategy == "group" and query.k % size:
            return f"needs in_features divisible by {size}, not {query.k}"
        wide = spec.scale_dtype == "float32" or (spec.scale_dtype == "model" and query.dtype == torch.float32)
        if not spec.symmetric and wide:
            return "keeps scales beside zero points in 16 bits, which would round float32 ones"
        return None

    def prepare(self, weight: QuantizedTensor) -> Packed:
        """Codes in the tensor core's order."""
        from quantkit_kernels.triton.w4a16 import pack

        codes = codes_of(weight)
        scale = codes.scale
        if scale.shape[0] == 1:
            scale = scale.expand(weight.shape[0], -1)
        zero = None if codes.zero is None else codes.zero.expand_as(scale)
        return pack(codes.codes, scale, zero)

    def run(self, x: torch.Tensor, prepared: Packed) -> torch.Tensor:
        """``x [m, k]`` → ``[m, n]`` in x's dtype."""
        from quantkit_kernels.triton.w4a16 import w4a16

        return w4a16(x, prepared)


class NF4:
    """NF4 weights in blocks of 64 that don't cross rows; nested scales are unfolded once."""

    name = "triton-nf4"
    order = 50

    def declines(self, query: KernelQuery) -> str | None:
        """Anything but NF4 in blocks of 64, with rows of whole blocks."""
        if (reason := _common(query, "nf", 4)) is not None:
            return reason
        if query.spec.granularity.size != NF4_BLOCK:
            return f"takes blocks of {NF4_BLOCK}, not {query.spec.granularity}"
        if query.k % NF4_BLOCK:
            return f"needs in_features divisible by {NF4_BLOCK}, not {query.k}"
        return None

    def prepare(self, weight: QuantizedTensor) -> Packed:
        """Codes in the tensor core's order."""
        from quantkit_kernels.triton.nf4 import pack

        codes = codes_of(weight)
        return pack(codes.codes, codes.scale)

    def run(self, x: torch.Tensor, prepared: Packed) -> torch.Tensor:
        """``x [m, k]`` → ``[m, n]`` in x's dtype."""
        from quantkit_kernels.triton.nf4 import nf4

        return nf4(x, prepared)


W8, W4, NF = W8A16(), W4A16(), NF4()
