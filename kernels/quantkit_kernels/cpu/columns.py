"""GPTQ's loops over the columns of a weight, each a kernel: the search for ranges, solving, and descent.

Rows of a weight don't depend on one another. A unit is a *tile*, 64 rows of all columns with a column's rows
side by side, ``[columns, 64]``. Every operation is one of vectors along the rows.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from llvmlite import ir

from quantkit_kernels.cpu.driver import begin
from quantkit_kernels.cpu.emit import Emitter
from quantkit_kernels.cpu.isa import Isa
from quantkit_kernels.cpu.values import F32, I64, Type, Value, vec

ROWS = 64
"""Rows of a tile."""
LEAST_LANES = 8
"""Of this module's vectors, where the instruction set's have fewer."""
TOGETHER = 4
"""Columns that a block's errors are subtracted from at a time, where vectors have 16 lanes. Four sums do not
wait for one another."""
AHEAD = 16
"""Columns that are fetched before they are needed: the rows of a wide matrix lie too far apart for a CPU to
guess."""
BLOCK = 64
"""Columns solved before the rest is updated."""
FARTHEST = 2.0**21
"""Quotients are clamped to this before rounding: further out, every level is clamped anyway."""
SMALLEST = {"bfloat16": 2.0**-126, "float16": 2.0**-24, "float32": 2.0**-126}
LARGEST = {"bfloat16": 3.3895313892515355e38, "float16": 65504.0, "float32": 3.4028234663852886e38}
EPSILON = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23}
"""Of the dtypes that scales are stored in."""
_SIZE = ROWS * 4
_LINE = 64

SEARCH_ARGUMENTS = ("*weight", "*cost", "*factors", "*scale", "*zero", "columns", "groups", "size", "count")
"""Of a record: ``weight`` float32 ``[units, columns, 64]``, ``cost`` ``[columns]``, ``factors`` ``[count]``;
results are ``scale`` and ``zero``, float32 ``[units, groups, 64]``; ``size`` columns are a group."""
SOLVE_ARGUMENTS = ("*work", "*lower", "*scale", "*zero", "*group", "*levels", "*room", "room_private",
                   "columns", "groups")
"""Of a record: ``work`` float32 ``[units, columns, 64]`` in solving order, overwritten; ``lower`` float32
``[columns, columns]``, the transpose of ``U`` with ``H⁻¹ = Uᵀ U``; ``group`` int64 ``[columns]``; results are
``levels``, float32 like ``work``."""
DESCEND_ARGUMENTS = ("*slopes", "*levels", "*scale", "*zero", "*hessian", "*room", "room_private", "columns",
                     "groups", "size", "block", "passes", "level_passes")
"""Of a record: ``slopes`` and ``levels`` float32 ``[units, columns, 64]``, ``scale`` and ``zero`` float32
``[units, groups, 64]``, all but ``zero`` updated; ``hessian`` float32 ``[columns, columns]``. ``block``
columns are worked on before the rest is updated. Of ``passes`` the first
``level_passes`` change levels too."""


@dataclass(frozen=True)
class SearchRanges:
    """Finds every group's range: of some factors on its extremes the one with the least weighted error.

    Attributes:
        bits: the bits of a level.
        symmetric: whether the zero is the middle level.
        dtype: in which scales are stored.
    """

    bits: int
    symmetric: bool
    dtype: str
    arguments: ClassVar[Sequence[str]] = SEARCH_ARGUMENTS

    @property
    def name(self) -> str:
        return f"search_ranges_{self.bits}_{'' if self.symmetric else 'a'}symmetric_{self.dtype}"

    def emit(self, module: ir.Module, isa: Isa) -> None:
        e, a, unit, _ = begin(module, self.name, SEARCH_ARGUMENTS)
        wide = _wide(isa)
        tile, grids = a.weight + unit * a.columns * _SIZE, unit * a.groups * _SIZE
        with e.loop(0, a.groups) as group:
            first, stop = group * a.size, (group + 1) * a.size
            for part in _parts(wide):
                low, high = e.var(e.const(wide, 0.0)), e.var(e.const(wide, 0.0))
                with e.loop(first, stop) as i:
                    weight = e.load(tile + i * _SIZE, wide, part)
                    low.set(e.min(weight, low.get()))
                    high.set(e.max(weight, high.get()))
                scale, zero = self._grid(e, low.get(), high.get())
                best, best_scale, best_zero = e.var(e.const(wide, 3e38)), e.var(scale), e.var(zero)
                with e.loop(0, a.count) as number:
                    factor = e.load(a.factors, F32, number * 4).spread(wide.count)
                    scale, zero = self._grid(e, low.get() * factor, high.get() * factor)
                    error = self._error(e, tile + part, a.cost, first, stop, scale, zero)
                    better = error < best.get()
                    for value, new in ((best, error), (best_scale, scale), (best_zero, zero)):
                        value.set(e.select(better, new, value.get()))
                at = grids + group * _SIZE + part
                e.store(a.scale + at, best_scale.get())
                e.store(a.zero + at, best_zero.get())
        e.ret()

    def _grid(self, e: Emitter, low: Value, high: Value) -> tuple[Value, Value]:
        top = 2.0**self.bits - 1
        if self.symmetric:
            scale = stored(e, e.max(-low, high) / (top / 2), self.dtype)
            zero = e.const(low.type, 2.0 ** (self.bits - 1))
        else:
            scale = stored(e, high / top - low / top, self.dtype)
            zero = clamped(e, e.round(-low / scale), top)
        return e.min(scale, largest_scale(e, zero, top, self.dtype)), zero

    def _error(self, e: Emitter, tile: Value, cost: Value, first: Value, stop: Value, scale: Value,
               zero: Value) -> Value:
        wide = scale.type
        inverse, total = e.const(wide, 1.0) / scale, e.var(e.const(wide, 0.0))
        lowest, highest = -zero, e.const(wide, 2.0**self.bits - 1) - zero
        with e.loop(first, stop) as i:
            scaled = e.load(tile + i * _SIZE, wide) * inverse
            off = e.round(e.min(e.max(scaled, lowest), highest)) - scaled
            weight = e.load(cost, F32, i * 4).spread(wide.count)
            total.set(e.fma(off * off, weight, total.get()))
        return total.get() * (scale * scale)


@dataclass(frozen=True)
class SolveColumns:
    """Rounds a column and spreads its error over the columns that are left, again and again.

    Attributes:
        bits: the bits of a level.
        table: the values of levels, rising, where they aren't equal steps from 0.
    """

    bits: int
    table: tuple[float, ...] | None = None
    arguments: ClassVar[Sequence[str]] = SOLVE_ARGUMENTS

    @property
    def name(self) -> str:
        return f"solve_columns_{self.bits}{_digest(self.table)}"

    @property
    def room_bytes(self) -> int:
        return BLOCK * _SIZE

    def emit(self, module: ir.Module, isa: Isa) -> None:
        e, a, unit, thread = begin(module, self.name, SOLVE_ARGUMENTS)
        wide = _wide(isa)
        work, levels = (start + unit * a.columns * _SIZE for start in (a.work, a.levels))
        grids, errors, top = unit * a.groups * _SIZE, a.room + thread * a.room_private, 2.0**self.bits - 1
        with e.loop(0, a.columns, BLOCK) as start:
            stop = e.min(start + BLOCK, a.columns)
            with e.loop(start, stop) as i:
                factors = a.lower + i * 4
                pivot = e.load(factors, F32, i * a.columns * 4).spread(wide.count)
                grid = grids + e.load(a.group, I64, i * 8) * _SIZE
                for at in _parts(wide):
                    scale, zero = e.load(a.scale + grid, wide, at), e.load(a.zero + grid, wide, at)
                    weight = e.load(work + i * _SIZE, wide, at)
                    level = nearest_level(e, weight / scale, zero, top, self.table)
                    e.store(levels + i * _SIZE, level, at)
                    error = weight - (level - zero) * scale
                    e.store(errors + (i - start) * _SIZE, error / pivot, at)
                _subtract(e, wide, work, i + 1, stop, factors, a.columns * 4, errors + (i - start) * _SIZE)
            _subtract_block(e, wide, work, stop, a.columns, errors, start, stop, a.lower, a.columns * 4)
        e.ret()


@dataclass(frozen=True)
class DescendColumns:
    """Coordinate descent on ``eᵀ H e`` over the scales of a block's groups and over its levels.

    Attributes:
        bits: the bits of a level.
        dtype: in which scales are stored; ``None``: they stay as they are. Otherwise a block is a group.
        table: the values of levels, rising, where they aren't equal steps from 0.
    """

    bits: int
    dtype: str | None
    table: tuple[float, ...] | None = None
    arguments: ClassVar[Sequence[str]] = DESCEND_ARGUMENTS

    @property
    def name(self) -> str:
        return f"descend_columns_{self.bits}_{self.dtype}{_digest(self.table)}"

    @staticmethod
    def room_bytes(block: int) -> int:
        return (3 * block + 1) * _SIZE

    def emit(self, module: ir.Module, isa: Isa) -> None:
        e, a, unit, thread = begin(module, self.name, DESCEND_ARGUMENTS)
        wide = _wide(isa)
        slopes, levels = (start + unit * a.columns * _SIZE for start in (a.slopes, a.levels))
        grids, moved = unit * a.groups * _SIZE, a.room + thread * a.room_private
        with e.loop(0, a.passes) as number, e.loop(0, (a.columns + a.block - 1) // a.block) as block:
            start = block * a.block
            stop = e.min(start + a.block, a.columns)
            with e.loop(start, stop) as i:
                for at in _parts(wide):
                    e.store(moved + (i - start) * _SIZE, e.const(wide, 0.0), at)
            columns = _Block(e, wide, self, a, slopes, levels, grids, start, stop, moved)
            if self.dtype is not None:
                columns.move_scales(self.dtype)
            with e.when(number < a.level_passes):
                columns.move_levels()
            for low, high in ((e.const(I64, 0), start), (stop, a.columns)):
                _subtract_block(e, wide, slopes, low, high, moved, start, stop, a.hessian, a.columns * 4)
        e.ret()


class _Block:
    """A block of columns of a tile. ``moved [block, 64]`` is how far each weight's value has gone."""

    def __init__(self, e: Emitter, wide: Type, spec: DescendColumns, a: Any, slopes: Value, levels: Value,
                 grids: Value, start: Value, stop: Value, moved: Value) -> None:
        self.e, self.wide, self.a = e, wide, a
        self.top, self.table = 2.0**spec.bits - 1, spec.table
        self.slopes, self.levels, self.grids, self.start, self.stop = slopes, levels, grids, start, stop
        self.moved = moved
        self.units, self.bends = moved + a.block * _SIZE, moved + a.block * (2 * _SIZE)
        self.steps = moved + a.block * (3 * _SIZE)

    def _grid(self, column: Value) -> Value:
        return self.grids + column // self.a.size * _SIZE

    def move_scales(self, dtype: str) -> None:
        """Put the group's scale where the loss is least with the levels as they are, rounded to ``dtype``, if
        it is less there. With the value ``u · scale`` of each weight the least is ``uᵀ s / uᵀ H u`` away."""
        e, wide, start, stop = self.e, self.wide, self.start, self.stop
        grid = self._grid(start)
        with e.loop(start, stop) as i:
            for at in _parts(wide):
                level = e.load(self.levels + i * _SIZE, wide, at)
                e.store(self.units + (i - start) * _SIZE, level - e.load(self.a.zero + grid, wide, at), at)
                e.store(self.bends + (i - start) * _SIZE, e.const(wide, 0.0), at)
        _subtract_block(e, wide, self.bends + (-start) * _SIZE, start, stop, self.units, start, stop,
                        self.a.hessian, self.a.columns * 4)
        for at in _parts(wide):
            slope, curve = e.var(e.const(wide, 0.0)), e.var(e.const(wide, 0.0))
            with e.loop(start, stop) as i:
                unit = e.load(self.units + (i - start) * _SIZE, wide, at)
                slope.set(e.fma(unit, e.load(self.slopes + i * _SIZE, wide, at), slope.get()))
                curve.set(e.fma(unit, -e.load(self.bends + (i - start) * _SIZE, wide, at), curve.get()))
            old, zero = e.load(self.a.scale + grid, wide, at), e.load(self.a.zero + grid, wide, at)
            positive = curve.get() > 0.0
            target = old + slope.get() / e.select(positive, curve.get(), e.const(wide, 1.0))
            new = stored(e, e.min(target, largest_scale(e, zero, self.top, dtype)), dtype)
            gain = (new - old) * (slope.get() * 2.0 - (new - old) * curve.get())
            new = e.select(positive, e.select(gain > 0.0, new, old), old)
            e.store(self.steps, new - old, at)
            e.store(self.a.scale + grid, new, at)
        with e.loop(start, stop) as i:
            for at in _parts(wide):
                place, step = (i - start) * _SIZE, e.load(self.steps, wide, at)
                e.store(self.moved + place, step * e.load(self.units + place, wide, at), at)
                before, bend = (e.load(values, wide, at) for values in (self.slopes + i * _SIZE,
                                                                         self.bends + place))
                e.store(self.slopes + i * _SIZE, e.fma(step, bend, before), at)

    def move_levels(self) -> None:
        """Put every weight on the level that is best with the others as they are."""
        e, wide = self.e, self.wide
        with e.loop(self.start, self.stop) as i:
            row, grid = self.a.hessian + i * self.a.columns * 4, self._grid(i)
            place = (i - self.start) * _SIZE
            pivot = e.load(row, F32, i * 4).spread(wide.count)
            for at in _parts(wide):
                scale, zero = e.load(self.a.scale + grid, wide, at), e.load(self.a.zero + grid, wide, at)
                old = e.load(self.levels + i * _SIZE, wide, at)
                best = e.load(self.slopes + i * _SIZE, wide, at) / (scale * pivot) + old - zero
                level = nearest_level(e, best, zero, self.top, self.table)
                step = (level - old) * scale
                e.store(self.levels + i * _SIZE, level, at)
                e.store(self.steps, step, at)
                e.store(self.moved + place, e.load(self.moved + place, wide, at) + step, at)
            _subtract(e, wide, self.slopes, self.start, self.stop, row, 4, self.steps)


def _digest(table: tuple[float, ...] | None) -> str:
    """The part of a function's name that says all of a table."""
    return "" if table is None else "_" + hashlib.sha256(repr(table).encode()).hexdigest()[:8]


def nearest_level(e: Emitter, quotient: Value, zero: Value, top: float,
                  table: tuple[float, ...] | None = None) -> Value:
    """Weights over their scales → the nearest levels, 0 to ``top`` or those of a rising ``table``; halfway
    between two of a table the lower one."""
    if table is not None:
        level = e.const(quotient.type, table[0])
        for lower, upper in itertools.pairwise(table):
            above = quotient > (lower + upper) / 2
            level = level + e.select(above, e.const(level.type, upper - lower),
                                     e.const(level.type, 0.0))
        return level
    far = e.const(quotient.type, FARTHEST)
    return clamped(e, e.round(e.min(e.max(quotient, -far), far)) + zero, top)


def clamped(e: Emitter, value: Value, top: float) -> Value:
    """Between 0 and ``top``."""
    return e.min(e.max(value, e.const(value.type, 0.0)), e.const(value.type, top))


def stored(e: Emitter, scale: Value, dtype: str) -> Value:
    """Scales as ``dtype`` stores them, never below its smallest."""
    scale = e.max(scale, e.const(scale.type, SMALLEST[dtype]))
    if dtype == "bfloat16":
        return e.widened(e.narrowed(scale))
    return e.half_widened(e.half_narrowed(scale)) if dtype == "float16" else scale


def largest_scale(e: Emitter, zero: Value, top: float, dtype: str) -> Value:
    """The largest scale in ``dtype`` with which no level overflows that dtype; a step less than the quotient,
    so that rounding it can't come out above."""
    quotient = e.const(zero.type, LARGEST[dtype] * (1 - EPSILON[dtype])) / e.max(
        zero, e.const(zero.type, top) - zero)
    return stored(e, quotient, dtype)


def _wide(isa: Isa) -> Type:
    """This module's vectors."""
    return vec(F32, max(LEAST_LANES, isa.lanes))


def _parts(wide: Type) -> range:
    """Where the vectors of a column begin."""
    return range(0, _SIZE, wide.count * 4)


def _subtract(e: Emitter, wide: Type, work: Value, start: Value, stop: Value, factors: Value,
              stride: Value | int, step: Value) -> None:
    """``work[j] −= factor_j · step`` for columns j of ``[start, stop)``; ``step`` is ``[64]``. Factors lie
    ``stride`` bytes apart."""
    with e.loop(start, stop) as j:
        factor = -e.load(factors + j * stride, F32).spread(wide.count)
        for at in _parts(wide):
            e.store(work + j * _SIZE, e.fma(factor, e.load(step, wide, at),
                                            e.load(work + j * _SIZE, wide, at)), at)


def _subtract_block(e: Emitter, wide: Type, work: Value, low: Value, high: Value, steps: Value, start: Value,
                    stop: Value, matrix: Value, stride: Value) -> None:
    """``work[j] −= Σ matrix[j, i] · steps[i]`` for columns j of ``[low, high)``, over columns i of the block
    ``[start, stop)``; ``steps`` is ``[block, 64]``. Rows of the matrix lie ``stride`` bytes apart."""
    ranges: list[tuple[Value, Value, int]] = [(low, high, 1)]
    if wide.count > LEAST_LANES:
        border = high - (high - low) % TOGETHER
        ranges = [(low, border, TOGETHER), (border, high, 1)]
    for first, last, count in ranges:
        with e.loop(first, last, count) as j:
            columns = [work + (j + number) * _SIZE for number in range(count)]
            rows = [matrix + (j + number) * stride for number in range(count)]
            remaining = [[e.var(e.load(column, wide, at)) for at in _parts(wide)] for column in columns]
            for row in rows:
                with e.loop(start * 4, stop * 4, _LINE) as at:
                    e.prefetch(row + stride * AHEAD + at)
            with e.loop(start, stop) as i:
                here = [e.load(steps + (i - start) * _SIZE, wide, at) for at in _parts(wide)]
                for row, sums in zip(rows, remaining):
                    factor = -e.load(row + i * 4, F32).spread(wide.count)
                    for step, total in zip(here, sums):
                        total.set(e.fma(factor, step, total.get()))
            for column, sums in zip(columns, remaining):
                for total, part in zip(sums, _parts(wide)):
                    e.store(column, total.get(), part)
