"""What this CPU can do at most: bytes that all threads read a second, and multiply-adds that they do.

Every share of a ceiling that is reported anywhere is a share of these. The roofline:
https://doi.org/10.1145/1498765.1498785
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from llvmlite import ir

from quantkit_kernels.cpu.driver import begin
from quantkit_kernels.cpu.emit import Emitter
from quantkit_kernels.cpu.isa import Isa
from quantkit_kernels.cpu.pool import Pool
from quantkit_kernels.cpu.product_tile import AHEAD
from quantkit_kernels.cpu.program import Program, ProgramKernel
from quantkit_kernels.cpu.tiles import ROWS, TILE_BYTES, Tiles
from quantkit_kernels.cpu.values import F32, I8, I16, I32, I64, Type, Value, vec

Operands = Literal["bf16", "float32", "int16", "int8"]
"""What is multiplied; bf16 and float32 are added up in float32, the others in integers."""
READ_ARGUMENTS = ("*data", "*sums", "size")
PRODUCT_ARGUMENTS = ("*data", "*sums", "steps")
LINE = 64
SIZE = 1 << 30
"""Bytes to read: more than the caches of a server with several sockets hold."""
UNIT = 1 << 20
"""Bytes that a thread reads at a time."""
CHAINS = 14
"""Sums that don't wait for each other: more than latency times instructions a cycle, and no more than AVX2's
16 registers hold."""
PLACES = 8
"""Vectors that all chains are multiplied by in turns, so that no product stays the same."""
STEPS, UNITS = 1 << 14, 64
"""Steps of a unit, and units of a thread: milliseconds in all."""
TILE_PAIRS = ((4, 6), (4, 7), (5, 6), (5, 7))
"""Tiles of AMX that are multiplied, into sums that don't wait for each other."""
REPEATS = 5
"""Measurements that a value is the median of, at least."""


class ReadKernel:
    """The sum of a unit's 32-bit words, lane by lane: 64 bytes of ``sums``."""

    name = "read"
    arguments: ClassVar[Sequence[str]] = READ_ARGUMENTS

    def emit(self, module: ir.Module, isa: Isa) -> None:
        e, a, unit, _ = begin(module, self.name, READ_ARGUMENTS)
        start = a.data + unit * a.size
        kind = vec(I32, LINE // 4)
        sums = [e.var(e.const(kind, 0)) for _ in range(2)]
        with e.loop(0, a.size, 2 * LINE) as at:
            for i, total in enumerate(sums):
                e.prefetch(start + at + (AHEAD + i * LINE))
                total.set(total.get() + e.load(start, kind, at + i * LINE))
        e.store(a.sums + unit * LINE, sums[0].get() + sums[1].get())
        e.ret()


@dataclass(frozen=True)
class ProductKernel:
    """Independent chains of the widest multiply-add that the instruction set has, over operands that stay in
    the first cache: a vector of ``data`` by :data:`CHAINS` others, ``steps`` times, or pairs of tiles."""

    operands: Operands
    arguments: ClassVar[Sequence[str]] = PRODUCT_ARGUMENTS

    @property
    def name(self) -> str:
        return f"products_{self.operands}"

    def emit(self, module: ir.Module, isa: Isa) -> None:
        e, a, unit, _ = begin(module, self.name, PRODUCT_ARGUMENTS)
        if isa.amx and self.operands == "bf16":
            e.store(a.sums + unit * LINE, self._multiply_tiles(e, a.data, a.steps))
            e.ret()
            return
        size = 4 * isa.lanes
        kind: Type = vec(F32, isa.lanes) if self.operands == "float32" else vec(I8, size)
        start = {"int8": isa.nothing(e), "int16": e.const(vec(I32, isa.lanes), 0)}.get(
            self.operands, e.const(vec(F32, isa.lanes), 0.0))
        others = [e.load(a.data, kind, i * size) for i in range(CHAINS)]
        sums = [e.var(start) for _ in others]
        with e.loop(0, a.steps) as step:
            shared = e.load(a.data + (step & (PLACES - 1)) * size, kind)
            for total, other in zip(sums, others):
                total.set(self._added(e, isa, total.get(), shared, other))
        for total in sums[1:]:
            sums[0].set(sums[0].get() + total.get())
        e.store(a.sums + unit * LINE, sums[0].get())
        e.ret()

    def _multiply_tiles(self, e: Emitter, data: Value, steps: Value) -> Value:
        """The first rows of all sums together; each operand's rows are a vector of ``data``."""
        tiles, row = Tiles(e), vec(F32, ROWS)
        tiles.begin()
        for total in range(len(TILE_PAIRS)):
            tiles.clear(total)
        for place, operand in enumerate(sorted({tile for pair in TILE_PAIRS for tile in pair})):
            tiles.load(operand, data + place * LINE, e.const(I64, 0))
        with e.loop(0, steps):
            for total, (left, right) in enumerate(TILE_PAIRS):
                tiles.multiply(total, left, right)
        room, sums = e.room(TILE_BYTES), e.const(row, 0.0)
        for total in range(len(TILE_PAIRS)):
            tiles.store(total, room)
            sums = sums + e.load(room, row)
        tiles.end()
        return sums

    def _added(self, e: Emitter, isa: Isa, total: Value, a: Value, b: Value) -> Value:
        if self.operands == "float32":
            return e.fma(a, b, total)
        if self.operands == "int8":
            return isa.bytes_dot(e, total, a, b)
        if self.operands == "int16":
            pairs = vec(I16, 2 * isa.lanes)
            return isa.words_dot(e, total, a.bits(pairs), b.bits(pairs))
        return isa.bfloat_dot(e, total, a, b)

    def multiply_adds(self, isa: Isa) -> int:
        """Of a unit."""
        if isa.amx and self.operands == "bf16":
            return STEPS * len(TILE_PAIRS) * 16 * 16 * 32
        return STEPS * CHAINS * isa.lanes * {"float32": 1, "bf16": 2, "int16": 2, "int8": 4}[self.operands]


class CpuCeilings:
    """Measures what all threads do at most.

    A ceiling is the median of all measurements that this object made. Whoever shares the memory or the cores
    comes and goes within seconds, and takes half of either: so a ceiling is measured between the runs whose
    share of it is told (:meth:`read`, :meth:`multiply`), which are told as medians too. The fastest of many
    reads would be a moment that no run of some seconds has.

    Args:
        pool: the threads.
        isa: the instruction set.

    Attributes:
        reads: bytes a second of every read so far.
        rates: multiply-adds a second so far.
    """

    def __init__(self, pool: Pool, isa: Isa) -> None:
        units = max(pool.threads, SIZE // UNIT)
        self._pool, self._isa, self._size = pool, isa, units * UNIT
        self._sums = torch.zeros(units, LINE // 4, dtype=torch.int32)
        self._reader = self._program(ReadKernel(), units, data=torch.ones(self._size // 4, dtype=torch.int32),
                                     sums=self._sums, size=UNIT)
        self.reads: list[float] = []
        self._multipliers: dict[ProductKernel, Program] = {}
        self.rates: defaultdict[Operands, list[float]] = defaultdict(list)

    def read(self) -> float:
        """Read once, after which caches have something else: bytes a second. Raises RuntimeError if it read
        something else than was there."""
        self.reads.append(self._size / self._timed(self._reader))
        if not np.all(self._sums.numpy() == UNIT // LINE):
            raise RuntimeError("the sums of what was read are wrong")
        return self.reads[-1]

    def bandwidth(self) -> float:
        """Bytes a second: the median of all reads, which are at least :data:`REPEATS`."""
        while len(self.reads) < REPEATS:
            self.read()
        return median(self.reads)

    def multiply(self, operands: Operands) -> float:
        """Multiply for some milliseconds: multiply-adds a second; of float32 where the CPU has no instruction
        for bf16."""
        kernel, units = ProductKernel(self._own(operands)), UNITS * self._pool.threads
        if kernel not in self._multipliers:
            self._multipliers[kernel] = self._program(
                kernel, units, data=torch.zeros(CHAINS * LINE, dtype=torch.uint8),
                sums=torch.zeros(units * LINE, dtype=torch.uint8), steps=STEPS)
        rate = units * kernel.multiply_adds(self._isa) / self._timed(self._multipliers[kernel])
        self.rates[kernel.operands].append(rate)
        return rate

    def products(self, operands: Operands) -> float:
        """Multiply-adds a second: the median of all of :meth:`multiply`, which are at least
        :data:`REPEATS`."""
        rates = self.rates[self._own(operands)]
        while len(rates) < REPEATS:
            self.multiply(operands)
        return median(rates)

    def _own(self, operands: Operands) -> Operands:
        """What is multiplied for these."""
        return "float32" if operands == "bf16" and not self._isa.bf16 else operands

    def _program(self, kernel: ProgramKernel, units: int, **values: Any) -> Program:
        program = Program(self._isa)
        program.add(kernel, units, **values)
        program.finish()
        self._pool.run(program.records)  # the first run takes the memory
        return program

    def _timed(self, program: Program) -> float:
        start = time.perf_counter()
        self._pool.run(program.records)
        return time.perf_counter() - start

