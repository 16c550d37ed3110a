"""A tile of a product of integers: some blocks of weights by some rows of activations, along all of k."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from quantkit_kernels.cpu.emit import Emitter
from quantkit_kernels.cpu.isa import Isa
from quantkit_kernels.cpu.product_spec import ProductSpec
from quantkit_kernels.cpu.scales import ScaleReader
from quantkit_kernels.cpu.values import F32, I8, I32, I64, Value, Var, vec
from quantkit_kernels.cpu.weight_decoder import STRIPE, SUB

AHEAD = 1024
"""Bytes by which weights are fetched before they are needed."""
TOGETHER = 4
"""Steps of a tile between which nothing is a loop."""
Sums = Sequence[Sequence[Value]]
"""A vector for each block and row."""


@dataclass(frozen=True)
class Turns:
    """How often the weights of a tile are read, for some rows of activations after others.

    The weights of the tile after it are fetched meanwhile, so that they come from memory all the time, and
    not while they are read for the first rows only. What lies ``distance`` bytes behind is
    fetched in parts, one in each turn from ``number`` 0 on; ``count``, a power of 2, is how many there are.
    """

    number: Value
    count: Value
    distance: Value

    @classmethod
    def of(cls, e: Emitter, number: Value, times: Value, distance: Value) -> Turns:
        """For weights that are read several ``times``."""
        count = e.select(times >= 4, e.const(I64, 4), e.select(times >= 2, e.const(I64, 2), e.const(I64, 1)))
        return cls(number, count, e.select(times > 1, distance, e.const(I64, AHEAD)))

    def now(self, s: Value) -> Value:
        """Whether what is behind the subgroup ``s`` is fetched in this turn."""
        return (s & (self.count - 1)).equals(self.number)


class GroupNumbers(NamedTuple):
    """What a group of each lane's row has: float32, or int32 for the zero point."""

    scale: Value | None = None
    minimum: Value | None = None
    zero: Value | None = None


@dataclass(frozen=True)
class _Tile:
    """Some blocks by some rows. ``unpacked`` says where the blocks lie if they were unpacked before."""

    blocks: Sequence[Value]
    rows: Sequence[Value]
    x: Sequence[Value]
    totals: Sequence[Sequence[Var]]
    unpacked: Sequence[Value] | None
    turns: Turns | None

    def each(self) -> Iterator[tuple[int, int]]:
        """Every place of the tile: block and row."""
        return ((b, m) for m in range(len(self.rows)) for b in range(len(self.blocks)))


class TileWriter:
    """Emits tiles of a product.

    Args:
        e: writes the kernel.
        a: the kernel's arguments.
        spec: says which product it is.
    """

    def __init__(self, e: Emitter, a: SimpleNamespace, isa: Isa, spec: ProductSpec) -> None:
        self.e = e
        self.a = a
        self.isa = isa
        self.spec = spec
        self.decoder = spec.decoder
        self.family = spec.decoder.family
        self.lanes = isa.lanes
        self.reals = vec(F32, isa.lanes)
        self.blocks_per_unpack = self.decoder.blocks_per_unpack(isa)
        self.block_bytes = a.subgroups * (self.decoder.bytes * self.lanes)
        self.plane_bytes = a.stripes * a.subgroups * (self.decoder.bytes * STRIPE)
        self.span = min(spec.group or SUB, SUB)
        columns, outer = a.subgroups * SUB, spec.scales.outer
        single = e.const(I64, 1)
        self.groups = columns // spec.group if spec.group else single
        self.superblocks = columns // outer if outer else single
        self.scales = ScaleReader(e, spec.scales, isa.lanes, a.scales, a.outer, self.groups, self.superblocks)
        self.matrices = isa.i8mm and self.family.width == 1
        """Whether unpacked weights lie by eight columns, which are multiplied by two rows at once."""
        self.sums_int16 = self.decoder.fits_int16 and isa.sums_int16

    def scratch(self, block: Any, subgroup: Value) -> Value:
        """Where a block's unpacked subgroup lies."""
        size = SUB * self.lanes * self.family.width
        place: Value = self.a.subgroups * block + subgroup
        return self.a.scratch + place * size

    def packed(self, block: Value, subgroup: Value) -> Value:
        """Where a block's subgroup lies as it is stored."""
        size = self.decoder.bytes * self.lanes * self.blocks_per_unpack
        return self.a.weights + block * self.block_bytes + subgroup * size

    def steps(self, sources: Sequence[Value]) -> Iterator[list[Value]]:
        """What lies there, unpacked as it is needed: there are few registers."""
        for parts in zip(*(self.decoder.unpack(self.e, self.isa, *self._planes(source))
                           for source in sources)):
            yield [value for part in parts for value in part]

    def scratch_steps(self, source: Value) -> Iterator[list[Value]]:
        """What lies there, as it comes to scratch memory."""
        steps = self.steps([source])
        if not self.matrices:
            yield from steps
            return
        for pair in zip(steps, steps):
            words = [[value.bits(vec(I32, self.lanes)) for value in values] for values in pair]
            for half in (range(self.lanes // 2), range(self.lanes // 2, self.lanes)):
                order = [at for lane in half for at in (lane, lane + self.lanes)]
                yield [first.shuffle(order, second) for first, second in zip(*words)]

    def multiply(self, block: Value, row: Value, blocks: int, rows: int,
                 scratch: Value | None = None, turns: Turns | None = None) -> None:
        """Write ``blocks`` blocks of weights by ``rows`` rows of activations.

        ``block`` is the first; where it was unpacked, ``scratch`` says which of those there it is. ``turns``:
        the blocks are read several times.
        """
        e, a = self.e, self.a
        unpacked = None
        if scratch is not None:
            unpacked, block = [self.scratch(scratch + b, e.const(I64, 0)) for b in range(blocks)], (
                block + scratch)
        start = e.const(vec(I32, self.lanes), 0) if self.family.sums_rows else e.const(self.reals, 0.0)
        tile = _Tile([block + b for b in range(blocks)], [row + m for m in range(rows)],
                     [a.x + (row + m) * a.x_stride for m in range(rows)],
                     [[e.var(start) for _ in range(rows)] for _ in range(blocks)], unpacked, turns)
        if self.family.sums_rows:
            with e.loop(0, a.subgroups) as s:
                sums = self._subgroup_sums(tile, s)
                for b, m in tile.each():
                    tile.totals[b][m].set(tile.totals[b][m].get() + sums[b][m])
        else:
            self._integers(tile)
        for b, at in enumerate(tile.blocks):
            scale = self.scales.read(at, e.const(I64, 0))[0] if self.spec.group == 0 else None
            for m, place in enumerate(tile.rows):
                self._finish(at, place, tile.totals[b][m].get(), scale)

    def _planes(self, source: Value) -> list[Value]:
        """Where a subgroup lies in each plane."""
        return [source] + [source + self.plane_bytes * plane for plane in range(1, self.decoder.planes)]

    def _weights(self, tile: _Tile, s: Value) -> Iterator[list[Value]]:
        """The steps of a subgroup."""
        if tile.unpacked is not None:
            at = s * (SUB * self.lanes * self.family.width)
            return self._loaded([source + at for source in tile.unpacked], SUB // self.family.step)
        sources = [self.packed(block, s) for block in tile.blocks[::self.blocks_per_unpack]]
        parts = [part for source in sources for part in self._planes(source)]
        if tile.turns is None:
            self._fetch(parts, AHEAD)
        else:
            with self.e.when(tile.turns.now(s)):
                self._fetch(parts, tile.turns.distance)
        return self.steps(sources)

    def _fetch(self, parts: Sequence[Value], distance: int | Value) -> None:
        """Begin to fetch what lies at this distance behind subgroups."""
        for part in parts:
            for line in range(0, self.decoder.bytes * self.lanes * self.blocks_per_unpack, 64):
                self.e.prefetch(part + distance + line)

    def _loaded(self, sources: Sequence[Value], count: int) -> Iterator[list[Value]]:
        """The unpacked vectors of ``count`` steps."""
        kind = self.family.vector(self.lanes)
        for i in range(count):
            yield [self.e.load(source, kind, i * self.lanes * 4) for source in sources]

    def _integers(self, tile: _Tile) -> None:
        """Exact sums of subgroups, or of their halves, each scaled and added."""
        e, span = self.e, self.span
        parts = SUB // span
        if tile.unpacked is not None:
            per = self.spec.group // span if self.spec.group else self.a.subgroups
            with self._groups(tile, 1) as (group, (numbers,)), e.loop(0, per) as step:
                run = group * per + step
                self._scale(tile, self._unpacked_sums(tile, run), run // parts, run, numbers)
            return

        def subgroup(s: Value, scales: Sequence[Sequence[GroupNumbers]]) -> None:
            steps = self._weights(tile, s)
            for part in range(parts):
                at = s * (SUB * self.family.width) + part * span * self.family.width
                sums = self._sums(tile, steps, at, span // self.family.step)
                self._scale(tile, sums, s, s * parts + part, scales[part])

        with self._groups(tile, parts) as (group, scales):
            per = max(1, self.spec.group // SUB) if self.spec.group else self.a.subgroups
            # over more subgroups LLVM's scheduler for ARM runs out of registers
            if isinstance(per, int) and per <= (1 if self.isa.neon else 4):
                for i in range(per):
                    subgroup(group * per + i, scales)
            else:
                with e.loop(0, per) as step:
                    subgroup(group * per + step, scales)

    @contextmanager
    def _groups(self, tile: _Tile, count: int) -> Iterator[tuple[Value, list[list[GroupNumbers]]]]:
        """A loop over groups, ``count`` at a time: the turn, and the numbers of each group in each block."""
        e, outer = self.e, self.spec.scales.outer
        if not self.spec.group:
            first = e.const(I64, 0)
            yield first, [[GroupNumbers(zero=self._zero(block, first)) for block in tile.blocks]]
            return

        def numbers(turn: Value, multiplied: Sequence[list[Value] | None]) -> list[list[GroupNumbers]]:
            return [[self._numbers(block, turn * count + i, factors)
                     for block, factors in zip(tile.blocks, multiplied)] for i in range(count)]

        if outer is None:
            with e.loop(0, self.groups // count) as turn:
                yield turn, numbers(turn, [None] * len(tile.blocks))
            return
        turns = outer // self.spec.group // count if outer else self.groups // count
        with e.loop(0, self.superblocks) as superblock:
            multiplied = [self.scales.multiplied(block, superblock) for block in tile.blocks]
            with e.loop(0, turns) as step:
                turn = superblock * turns + step
                yield turn, numbers(turn, multiplied)

    def _numbers(self, block: Value, group: Value, multiplied: list[Value] | None) -> GroupNumbers:
        scale, *minimum = self.scales.read(block, group, multiplied)
        return GroupNumbers(scale, minimum[0] if minimum else None, self._zero(block, group))

    def _zero(self, block: Value, group: Value) -> Value | None:
        if not self.spec.zeros:
            return None
        where = self.a.zeros + (block * self.groups + group) * self.lanes
        zeros, wide = self.e.load(where, vec(I8, self.lanes)), vec(I32, self.lanes)
        return zeros.zext(wide) if self.family.unsigned else zeros.sext(wide)

    def _subgroup_sums(self, tile: _Tile, s: Value) -> Sums:
        """A subgroup's sums, int32."""
        if tile.unpacked is not None:
            return self._unpacked_sums(tile, s)
        at = s * (SUB * self.family.width)
        return self._sums(tile, self._weights(tile, s), at, SUB // self.family.step)

    def _sums(self, tile: _Tile, steps: Iterator[list[Value]], at: Value, count: int) -> Sums:
        """The sums of the next ``count`` steps, int32; activations lie ``at`` bytes from a row's begin."""
        total: Sums | None = None
        every = TOGETHER if self.sums_int16 else count
        for first in range(0, count, every):
            sums = [[self._nothing() for _ in tile.rows] for _ in tile.blocks]
            for i in range(first, first + every):
                self._add(tile, sums, next(steps), self._factors(tile, at, i))
            part = self._finished(sums)
            total = part if total is None else [[a + b for a, b in zip(*lines)] for lines in zip(total, part)]
        assert total is not None
        return total

    def _unpacked_sums(self, tile: _Tile, run: Value) -> Sums:
        """The same of unpacked weights, some steps at a time: over more of them the compiler runs out of
        registers. ``run``: which subgroup, or half of one."""
        e, count, size = self.e, self.span // self.family.step, self.span * self.family.width
        assert tile.unpacked is not None
        sources = [source + run * (size * self.lanes) for source in tile.unpacked]
        if self.matrices:
            return self._matrix_sums(sources, [x + run * size for x in tile.x])
        if count <= TOGETHER:
            return self._sums(tile, self._loaded(sources, count), run * size, count)
        start = e.const(vec(I32, self.lanes), 0) if self.sums_int16 else self._nothing()
        variables = [[e.var(start) for _ in tile.rows] for _ in tile.blocks]
        with e.loop(0, count * 4, 4 * TOGETHER) as at:
            steps = self._loaded([source + at * self.lanes for source in sources], TOGETHER)
            if self.sums_int16:
                new = self._sums(tile, steps, run * size + at, TOGETHER)
                for b, m in tile.each():
                    variables[b][m].set(variables[b][m].get() + new[b][m])
            else:
                now = [[variable.get() for variable in line] for line in variables]
                for i in range(TOGETHER):
                    self._add(tile, now, next(steps), self._factors(tile, run * size + at, i))
                for b, m in tile.each():
                    variables[b][m].set(now[b][m])
        sums = [[variable.get() for variable in line] for line in variables]
        return sums if self.sums_int16 else self._finished(sums)

    def _matrix_sums(self, sources: Sequence[Value], inputs: Sequence[Value]) -> Sums:
        """The same of two rows at once, the last of an odd number twice."""
        e, lanes = self.e, self.lanes
        pairs = [(inputs[m], inputs[min(m + 1, len(inputs) - 1)]) for m in range(0, len(inputs), 2)]
        sums = [[e.const(vec(I32, 2 * lanes), 0) for _ in pairs] for _ in sources]
        for column in range(0, self.span, 8):
            weights = [e.load(source, vec(I8, 8 * lanes), column * lanes) for source in sources]
            for m, pair in enumerate(pairs):
                first, second = (e.load(x, vec(I8, 8), column) for x in pair)
                factor = first.shuffle(range(16), second)
                for line, weight in zip(sums, weights):
                    line[m] = self.isa.matrix_dot(e, line[m], weight, factor)
        return [[line[m // 2].shuffle(range(m % 2, 2 * lanes, 2)) for m in range(len(inputs))]
                for line in sums]

    def _add(self, tile: _Tile, sums: list[list[Value]], weights: Sequence[Value],
             factors: Sequence[Value]) -> None:
        add = self.family.dot(self.isa, self.decoder.signed)
        for b, m in tile.each():
            sums[b][m] = add(self.e, sums[b][m], weights[b], factors[m])

    def _factors(self, tile: _Tile, at: Value, step: int) -> list[Value]:
        """The step's values of each row of activations, in every lane."""
        kind = self.family.vector(self.lanes)
        if self.isa.neon:  # ARM multiplies by a lane of a vector
            run, first = vec(self.family.element(), 4 * self.family.step), step % 4 * self.family.step
            order = [*range(first, first + self.family.step)] * self.lanes
            return [self.e.load(x + at, run, step // 4 * 16).shuffle(order) for x in tile.x]
        return [self.e.load(x + at, I32, step * 4).spread(self.lanes).bits(kind) for x in tile.x]

    def _nothing(self) -> Value:
        """A sum that holds nothing yet."""
        return self.isa.nothing(self.e) if self.decoder.unsigned else self.e.const(vec(I32, self.lanes), 0)

    def _finished(self, sums: Sums) -> Sums:
        """Sums as int32."""
        if not self.decoder.unsigned:
            return sums
        return [[self.isa.finished(self.e, total) for total in line] for line in sums]

    def _scale(self, tile: _Tile, sums: Sums, s: Value, run: Value, numbers: Sequence[GroupNumbers]) -> None:
        """Add integer sums to the totals: of the subgroup ``s``, or of its half ``run``."""
        e, a, minima = self.e, self.a, self.spec.scales.minima
        for m, row in enumerate(tile.rows):
            step = e.load(a.x_scales, F32, row * a.x_stride + s * 4)
            scale, x_sum, shift = step.spread(self.lanes), None, None
            if self.spec.zeros or self.spec.high or minima or self.decoder.zero(self.isa):
                where = a.x_sums if self.span == SUB else a.x_sums + a.subgroups * 4
                x_sum = e.load(where, I32, row * a.x_stride + run * 4)
                shift = (x_sum.real() * step).spread(self.lanes) if minima else None
            for b, group in enumerate(numbers):
                part, total = self._centered(sums[b][m], x_sum, group.zero), tile.totals[b][m]
                if group.scale is None:
                    total.set(e.fma(part.real(), scale, total.get()))
                else:
                    total.set(e.fma(part.real() * scale, group.scale, total.get()))
                if shift is not None and group.minimum is not None:
                    total.set(e.fma(shift, group.minimum, total.get()))

    def _centered(self, part: Value, x_sum: Value | None, zero: Value | None) -> Value:
        """A sum of products as if levels had been multiplied: less what means 0, times the activations."""
        middle = self.decoder.zero(self.isa)
        if x_sum is None or not (self.spec.high or self.spec.zeros or middle):
            return part
        if self.spec.high:
            return (part << 4) - x_sum.spread(self.lanes) * 120
        if zero is not None:
            return part - x_sum.spread(self.lanes) * zero
        if middle == 8:
            return part - (x_sum.spread(self.lanes) << 3)
        return part - (x_sum * middle).spread(self.lanes)

    def _finish(self, block: Value, row: Value, total: Value, scale: Value | None) -> None:
        """Scale a sum over all of k, and store it."""
        e, a = self.e, self.a
        if self.family.sums_rows:
            if self.isa.offset:
                total = total - e.load(a.x_sums, I32, row * a.x_stride).spread(self.lanes) * self.isa.offset
            total = total.real()
        if self.family.by_token:
            total = total * e.load(a.x_scales, F32, row * a.x_stride).spread(self.lanes)
        if scale is not None:
            total = total * scale
        column = block * (self.lanes * 4)
        where = a.out + row * a.out_stride + column
        variable = e.var(total)
        with e.when(e.present(a.bias)):
            variable.set(variable.get() + e.load(a.bias + column, self.reals))
        with e.when(a.add.differs(0)):
            variable.set(e.load(where, self.reals) + variable.get())
        e.store(where, variable.get())
