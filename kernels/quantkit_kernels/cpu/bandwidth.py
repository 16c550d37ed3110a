"""How fast this machine reads memory: the ceiling of every kernel that must read weights."""

from __future__ import annotations

import time

import numpy as np
import torch

from quantkit_kernels.cpu.isa import Isa
from quantkit_kernels.cpu.pool import Pool
from quantkit_kernels.cpu.program import Program
from quantkit_kernels.cpu.read import LINE, ReadKernel

UNIT = 1 << 20
"""Bytes that a thread reads at a time."""


class Bandwidth:
    """Measures how fast all threads read.

    Args:
        pool: the threads.
        isa: of this machine.
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
