"""The CPU's products with W8A8, and with fp8 weights, whose activations are rounded or not."""

from __future__ import annotations

from quantkit.formats.base import Codes, QuantizedTensor
from quantkit.ops.cpu_linear import CpuKernel, grouped
from quantkit.ops.cpu_machine import isa
from quantkit.ops.cpu_scales import tile_scales
from quantkit.ops.cpu_weight import CpuWeight, padded
from quantkit.ops.dispatch import KernelQuery


class CpuW8A8(CpuKernel):
    """int8 weights with a scale a row by int8 activations with a scale a token."""

    name = "cpu-w8a8"

    def _declines(self, query: KernelQuery) -> str | None:
        from quantkit_kernels.cpu.matmul import MOST_COLUMNS

        if query.spec.kind != "int" or query.spec.activations is None:
            return "multiplies int8 weights by int8 activations"
        if query.k > MOST_COLUMNS:
            return f"adds up to {MOST_COLUMNS} products in 32 bits, not {query.k}"
        return None

    def _pack(self, codes: Codes, weight: QuantizedTensor) -> CpuWeight:
        from quantkit_kernels.cpu import decoders, pack

        return grouped(self.name, codes, weight, decoders.W8A8,
                       lambda lanes, _: pack.w8a8(codes.codes, lanes))


class CpuFP8(CpuKernel):
    """e4m3 weights with a scale a row, or for each tile without rounding activations, by float32 activations
    or by e4m3 ones with a scale a token."""

    name = "cpu-fp8"

    def _declines(self, query: KernelQuery) -> str | None:
        from quantkit_kernels.cpu.weight_decoder import SUB

        spec = query.spec
        if spec.kind != "fp" or spec.bits != 8:
            return f"multiplies fp8, not {spec.kind}{spec.bits}"
        if spec.activations == "group":
            return "rounds activations with one scale a token, or not at all"
        if (spec.granularity.size or 0) % SUB:
            return f"takes tiles of a multiple of {SUB}, not {spec.granularity}"
        return None

    def _pack(self, codes: Codes, weight: QuantizedTensor) -> CpuWeight:
        from quantkit_kernels.cpu import decoders, matmul, pack

        size = codes.spec.granularity.size
        if size is None:
            decoder = decoders.E4M3_TOKENS if codes.spec.activations else decoders.E4M3
            return grouped(self.name, codes, weight, decoder,
                           lambda lanes, _: pack.e4m3(codes.codes, lanes))
        columns = padded(weight.shape[1], size)
        scales = tile_scales(codes.scale, weight.shape[0], columns, size)
        return CpuWeight(self.name, matmul.Matmul(decoders.E4M3, size, scales.layout), weight.shape, columns,
                         pack.e4m3(codes.codes, isa().lanes, size), scales.scales)


INT, FP = CpuW8A8(), CpuFP8()
