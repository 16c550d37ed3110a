"""The CPU's products with 4-bit codes that are places in a table of levels."""

from __future__ import annotations

from quantkit.formats.base import Codes, QuantizedTensor
from quantkit.formats.level_values import level_table
from quantkit.formats.spec import Kind
from quantkit.ops.cpu_linear import CpuKernel, group_declines, grouped
from quantkit.ops.cpu_weight import CpuWeight
from quantkit.ops.dispatch import KernelQuery


class CpuTable(CpuKernel):
    """A table whose levels are whole numbers, or halves of them, activations as int8 with a scale for each
    32.

    That is as exact as :class:`~quantkit.ops.cpu_linear.CpuInt4` is: every level is an int8 as it is, unlike
    those of NF4.

    Args:
        name: of the kernel.
        kind: of the specs that have such a table.
    """

    def __init__(self, name: str, kind: Kind) -> None:
        self.name, self._kind = name, kind

    def _declines(self, query: KernelQuery) -> str | None:
        spec = query.spec
        if spec.kind != self._kind or spec.bits != 4:
            return f"multiplies {self._kind}4, not {spec.kind}{spec.bits}"
        if spec.activations:
            return "leaves activations as they are"
        return group_declines(query)

    def _pack(self, codes: Codes, weight: QuantizedTensor) -> CpuWeight:
        from quantkit_kernels.cpu import decoders, pack

        table = level_table(codes.spec)
        assert table is not None
        times = 1 if all(level.is_integer() for level in table) else 2
        decoder = decoders.int_table(tuple(int(level * times) for level in table))
        return grouped(self.name, codes, weight, decoder,
                       lambda lanes, multiple: pack.int4(codes.codes, lanes, multiple), factor=1 / times)


FP4, IQ4 = CpuTable("cpu-fp4", "fp"), CpuTable("cpu-iq4", "iq")
