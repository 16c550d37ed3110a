"""Reads memory and does next to nothing with it: the ceiling of whatever must read weights."""

from __future__ import annotations

from llvmlite import ir

from quantkit_kernels.cpu.driver import begin
from quantkit_kernels.cpu.product_tile import AHEAD
from quantkit_kernels.cpu.values import I32, vec

ARGUMENTS = ("*data", "*sums", "size")
LINE = 64


class ReadKernel:
    """The sum of a unit's 32-bit words, lane by lane: 64 bytes of ``sums``."""

    name = "read"

    def emit(self, module: ir.Module) -> None:
        """Write the kernel into a module."""
        e, a, unit, _ = begin(module, self.name, ARGUMENTS)
        start = a.data + unit * a.size
        kind = vec(I32, LINE // 4)
        sums = [e.var(e.const(kind, 0)) for _ in range(2)]
        with e.loop(0, a.size, 2 * LINE) as at:
            for i, total in enumerate(sums):
                e.prefetch(start + at + (AHEAD + i * LINE))
                total.set(total.get() + e.load(start, kind, at + i * LINE))
        e.store(a.sums + unit * LINE, sums[0].get() + sums[1].get())
        e.ret()
