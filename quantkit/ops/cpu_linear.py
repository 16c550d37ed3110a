"""Matrix products on the CPU by kernels of our own, straight from packed codes."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Literal

import torch

from quantkit.formats.base import Codes, QuantizedTensor
from quantkit.formats.nf4_table import codebook
from quantkit.formats.trellis_code import HIGH, LOW, MIDDLE
from quantkit.ops import gpu
from quantkit.ops.cpu_machine import isa, unavailable
from quantkit.ops.cpu_weight import CpuWeight, multiply, padded
from quantkit.ops.dispatch import KernelQuery, codes_of

HALF = (torch.bfloat16, torch.float16)
"""Activations whose own rounding is about as coarse as that to the integers of a group of 32."""


class CpuKernel(ABC):
    """What the kernels have in common."""

    name = ""
    order = 40

    def declines(self, query: KernelQuery) -> str | None:
        """Anything but the weights that it has a decoder for, on a CPU."""
        if query.op != "linear":
            return f"implements linear, not {query.op}"
        if query.device != "cpu":
            return f"runs on cpu, not {query.device}"
        if query.dtype not in HALF:
            return f"takes bfloat16 or float16 activations, not {str(query.dtype).removeprefix('torch.')}"
        if gpu.SIMULATE and gpu.unavailable(query.device, query.dtype) is None:
            return "leaves it to the GPU's kernels, which are simulated"
        return unavailable() or self._declines(query)

    @abstractmethod
    def _declines(self, query: KernelQuery) -> str | None:
        """Why not these weights."""

    def prepare(self, weight: QuantizedTensor) -> CpuWeight:
        """Codes in the kernel's order."""
        packed = self._pack(codes_of(weight), weight)
        return dataclasses.replace(packed, rotated=weight.spec.rotation is not None)

    @abstractmethod
    def _pack(self, codes: Codes, weight: QuantizedTensor) -> CpuWeight:
        """Its codes, reordered."""

    def run(self, x: torch.Tensor, prepared: CpuWeight) -> torch.Tensor:
        """``x [m, k]`` → ``[m, n]`` in x's dtype."""
        return multiply(x, prepared)


class CpuInt8(CpuKernel):
    """Integers of 5 to 8 bits, with or without zero points, activations as 14-bit integers with a scale for
    each 32."""

    name = "cpu-int8"

    def _declines(self, query: KernelQuery) -> str | None:
        spec = query.spec
        if spec.kind != "int" or spec.bits not in (5, 6, 7, 8):
            return f"multiplies integers of 5 to 8 bits, not {spec.kind}{spec.bits}"
        if spec.activations:
            return "leaves activations as they are"
        return _group_declines(query)

    def _pack(self, codes: Codes, weight: QuantizedTensor) -> CpuWeight:
        from quantkit_kernels.cpu import decoders, matmul, pack

        group = codes.spec.granularity.size or 0
        kind, scale = stored_scale(codes, weight)
        middle, zeros = 2 ** (codes.spec.bits - 1), None
        if codes.zero is not None:
            zero = (codes.zero.to(torch.int16) - middle).to(torch.int8).view(torch.uint8)
            zeros = pack.scales(zero.expand(scale.shape[0], -1), isa().lanes)
        return CpuWeight(self.name, matmul.Matmul(decoders.INT8, group, kind, zeros is not None),
                         weight.shape, padded(weight.shape[1], max(group, matmul.SUB)),
                         pack.int8(codes.codes, isa().lanes, max(group, matmul.SUB), middle),
                         pack.scales(scale, isa().lanes), zeros)


class CpuInt4(CpuKernel):
    """Integers of up to 4 bits, with or without zero points, activations as int8 with a scale for each 32."""

    name = "cpu-int4"

    def _declines(self, query: KernelQuery) -> str | None:
        spec = query.spec
        if spec.kind != "int" or spec.bits > 4:
            return f"multiplies integers of at most 4 bits, not {spec.kind}{spec.bits}"
        return _group_declines(query)

    def _pack(self, codes: Codes, weight: QuantizedTensor) -> CpuWeight:
        from quantkit_kernels.cpu import decoders, matmul, pack

        group = codes.spec.granularity.size or 0
        kind, scale = stored_scale(codes, weight)
        level, zeros = codes.codes, None
        if codes.zero is None:
            if codes.spec.bits < 4:
                level = level + (8 - 2 ** (codes.spec.bits - 1))  # the kernel's middle is 8
        else:
            zeros = pack.scales(codes.zero.expand(scale.shape[0], -1), isa().lanes)
        return CpuWeight(self.name, matmul.Matmul(decoders.INT4, group, kind, zeros is not None),
                         weight.shape, padded(weight.shape[1], max(group, matmul.SUB)),
                         pack.int4(level, isa().lanes, max(group, matmul.SUB)),
                         pack.scales(scale, isa().lanes), zeros)


class CpuNF4(CpuKernel):
    """NF4 in blocks that don't cross rows, activations as 14-bit integers with a scale for each 32."""

    name = "cpu-nf4"

    def _declines(self, query: KernelQuery) -> str | None:
        if query.spec.kind != "nf":
            return f"multiplies nf, not {query.spec.kind}"
        size = query.spec.granularity.size or 0
        if query.k % size:
            return f"needs in_features divisible by the block of {size}, not {query.k}"
        return _group_declines(query)

    def _pack(self, codes: Codes, weight: QuantizedTensor) -> CpuWeight:
        from quantkit_kernels.cpu import decoders, matmul, pack

        group = codes.spec.granularity.size or 0
        table = tuple(codebook().tolist())
        scale = codes.scale.reshape(weight.shape[0], -1) / decoders.NF4_LEVELS
        return CpuWeight(self.name, matmul.Matmul(decoders.nf4(table), group), weight.shape,
                         padded(weight.shape[1], group), pack.nf4(codes.codes, isa().lanes, group),
                         pack.scales(scale, isa().lanes))


class CpuTrellis(CpuKernel):
    """A trellis, activations as 14-bit integers with a scale for each 32."""

    name = "cpu-trellis"

    def _declines(self, query: KernelQuery) -> str | None:
        return None if query.spec.kind == "trellis" else f"multiplies a trellis, not {query.spec.kind}"

    def _pack(self, codes: Codes, weight: QuantizedTensor) -> CpuWeight:
        from quantkit_kernels.cpu import decoders, matmul, pack

        spec = codes.spec
        assert spec.window is not None
        kind, scale = stored_scale(codes, weight)
        decoder = decoders.trellis(spec.bits, spec.window, (LOW, HIGH, MIDDLE))
        return CpuWeight(self.name, matmul.Matmul(decoder, 0, kind), weight.shape,
                         padded(weight.shape[1], matmul.SUB), pack.trellis(codes.codes, spec.bits),
                         pack.scales(scale, isa().lanes))


def _group_declines(query: KernelQuery) -> str | None:
    from quantkit_kernels.cpu.matmul import SUB

    granularity = query.spec.granularity
    if query.spec.minimum:
        return "has whole zero points, not minima"
    if granularity.size is not None and granularity.size % SUB:
        return f"takes groups of a multiple of {SUB}, not {granularity}"
    return None


def stored_scale(codes: Codes, weight: QuantizedTensor) -> tuple[Literal['bf16', 'f32'], torch.Tensor]:
    """Scales ``[n, groups]`` as they are stored: 16 bits if nothing is lost by it."""
    scale = codes.scale.expand(weight.shape[0], -1) if codes.scale.dim() == 2 else codes.scale.expand(
        weight.shape[0]).unsqueeze(1)
    if codes.spec.scale_dtype == "bfloat16":
        return "bf16", scale.to(torch.bfloat16)
    return "f32", scale.float()


INT8, INT4, NF, TRELLIS = CpuInt8(), CpuInt4(), CpuNF4(), CpuTrellis()
