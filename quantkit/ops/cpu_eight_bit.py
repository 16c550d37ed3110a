"""The CPU's products with W8A8, and with fp8 weights, whose activations are rounded or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quantkit.formats.base import Codes, QuantizedTensor
from quantkit.ops.cpu_linear import CpuKernel, stored_scale
from quantkit.ops.cpu_machine import isa
from quantkit.ops.cpu_weight import CpuWeight, padded
from quantkit.ops.dispatch import KernelQuery

if TYPE_CHECKING:
    from quantkit_kernels.cpu.matmul import WeightDecoder


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

        return _packed(self.name, codes, weight, decoders.W8A8, pack.w8a8(codes.codes, isa().lanes))


class CpuFP8(CpuKernel):
    """e4m3 weights with a scale a row, by float32 activations or by e4m3 ones with a scale a token."""

    name = "cpu-fp8"

    def _declines(self, query: KernelQuery) -> str | None:
        if query.spec.grid != "fp":
            return f"multiplies fp8 with a scale a row or a tensor, not {query.spec.label()}"
        return None

    def _pack(self, codes: Codes, weight: QuantizedTensor) -> CpuWeight:
        from quantkit_kernels.cpu import decoders, pack

        decoder = decoders.E4M3_TOKENS if codes.spec.activations else decoders.E4M3
        return _packed(self.name, codes, weight, decoder, pack.e4m3(codes.codes, isa().lanes))


def _packed(name: str, codes: Codes, weight: QuantizedTensor, decoder: WeightDecoder,
            data: torch.Tensor) -> CpuWeight:
    from quantkit_kernels.cpu import matmul, pack

    kind, scale = stored_scale(codes, weight)
    columns = padded(weight.shape[1], matmul.SUB)
    return CpuWeight(name, matmul.Matmul(decoder, 0, kind), weight.shape, columns, data,
                     pack.scales(scale, isa().lanes))


INT, FP = CpuW8A8(), CpuFP8()
