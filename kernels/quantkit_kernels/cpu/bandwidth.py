"""Reads memory and does next to nothing with it: the ceiling of whatever must read weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from llvmlite import ir

from quantkit_kernels.cpu.driver import begin
from quantkit_kernels.cpu.isa import Isa
from quantkit_kernels.cpu.pool import Pool
from quantkit_kernels.cpu.product_tile import AHEAD
from quantkit_kernels.cpu.program import Program
from quantkit_kernels.cpu.values import I32, vec

ARGUMENTS = ("*data", "*sums", "size")
LINE = 64


class ReadKernel:
    """The sum of a unit's 32-bit words, lane by lane: 64 bytes of ``sums``."""

    name = "read"
    arguments: ClassVar[Sequence[str]] = ARGUMENTS

    def emit(self, module: ir.Module, isa: Isa) -> None:
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


UNIT = 1 << 20
"""Bytes that a thread reads at a time."""


class Bandwidth:
    """Measures how fast all threads read.

    Args:
        pool: the threads that read.
        size: bytes to read; more than the caches hold.
    """

    def __init__(self, pool: Pool, isa: Isa, size: int = 1 << 30) -> None:
        units = max(pool.threads, size // UNIT)
        self._pool, self._size = pool, units * UNIT
        data = torch.ones(self._size // 4, dtype=torch.int32)
        self._sums = torch.zeros(units, LINE // 4, dtype=torch.int32)
        program = Program(isa)
        program.add(ReadKernel(), units, data=data, sums=self._sums, size=UNIT)
        program.finish()
        self._program = program

    def measure(self) -> float:
        """Bytes a second, of one read. Raises RuntimeError if it read something else than was there."""
        begin = time.perf_counter()
        self._pool.run(self._program.records)
        spent = time.perf_counter() - begin
        if not np.all(self._sums.numpy() == UNIT // LINE):
            raise RuntimeError("the sums of what was read are wrong")
        return self._size / spent
