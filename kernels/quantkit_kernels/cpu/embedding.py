"""Rows of an embedding: from a plain table, or from the blocks that the head multiplies."""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from quantkit_kernels.cpu.driver import begin
from quantkit_kernels.cpu.matmul import SUB
from quantkit_kernels.cpu.values import F32, I16, I32, I64, Value, vec

ARGUMENTS = ("*ids", "*table", "*out", "size", "padded", "out_stride")
"""``ids`` int64 ``[M]``; ``table`` bfloat16; ``size``: of a row, padded to whole
subgroups in blocks; ``padded``: of a row of out, 0 at its end."""


@dataclass(frozen=True)
class Embed:
    """A unit is a token: its row as float32, times a number.

    Attributes:
        lanes: rows in a block of the packed bfloat16 weight; 0: a plain table ``[vocab, size]``.
        scale: the number.
    """

    lanes: int
    scale: float = 1.0

    @property
    def name(self) -> str:
        """Of the function."""
        times = "" if self.scale == 1.0 else f"_times_{self.scale!r}"
        return f"embed_{'blocks' if self.lanes else 'table'}{times}"

    def emit(self, module: ir.Module) -> None:
        """Write the kernel into a module."""
        e, a, unit, _ = begin(module, self.name, ARGUMENTS)
        token = e.load(a.ids, I64, unit * 8)
        out = a.out + unit * a.out_stride
        if self.lanes:
            row = a.table + token // self.lanes * a.size * (2 * self.lanes) + token % self.lanes * 4
            with e.loop(0, a.size, SUB) as k:
                for i in range(0, SUB, 2):
                    pair = e.load(row + (k + i) * (2 * self.lanes), vec(I16, 2))
                    e.store(out + (k + i) * 4, self._times(e.widened(pair)))
        else:
            row = a.table + token * a.size * 2
            with e.loop(0, a.size) as k:
                e.store(out + k * 4, self._times((e.load(row, I16, k * 2).zext(I32) << 16).bits(F32)))
            with e.loop(a.size, a.padded) as k:  # a later row must not find what an earlier one left
                e.store(out + k * 4, e.const(F32, 0.0))
        e.ret()

    def _times(self, value: Value) -> Value:
        return value if self.scale == 1.0 else value * self.scale
