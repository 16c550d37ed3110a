"""``y = x Wᵀ``: one loop for all formats; a decoder says how a format's weights are unpacked.

Weights lie in blocks of ``lanes`` rows, a row a lane, in the order in which they are read; 32 values of a
row are a subgroup. An output is a sum over subgroups in rising order, each an exact sum of integers (or one
such sum over the whole row, where its activations share a scale; or, for floating-point weights, a chain of
fused multiply-adds over k, of float32 ones in parts, so that errors don't pile up): the same bits for one row
of activations or many, for any number of threads and any instruction set.

A few rows are multiplied while weights are unpacked in registers. For more rows a block is unpacked once
into this thread's scratch memory, and all rows are multiplied from there, a tile of rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llvmlite import ir

from quantkit_kernels.cpu.driver import begin
from quantkit_kernels.cpu.isa import Isa
from quantkit_kernels.cpu.values import F32, I8, I16, I32, I64, Type, Value, Var, vec

SUB = 32
"""Values of a row in a subgroup: what shares one scale of the activations."""
STRIPE = 32
"""The rows of a weight are padded to a multiple of this, and units are multiples of it."""
AHEAD = 1024
"""Bytes by which weights are fetched before they are needed."""
TOGETHER = 4
"""Steps of a tile between which nothing is a loop."""
ARGUMENTS = ("*weights", "*scales", "*zeros", "*x", "*x_scales", "*x_sums", "*out", "*bias", "*scratch",
             "add", "x_stride", "out_stride", "stripes", "subgroups", "stripes_a_unit", "rows",
             "rows_a_unit", "x_private", "scratch_private")
"""Of a record. Strides are bytes; ``x_stride`` is that of codes, scales and sums alike. ``x_private`` and
``scratch_private`` are those from thread to thread."""
Family = Literal["bytes", "words", "floats", "int8", "e4m3"]
"""How activations come: int8 or int16 with a scale and a sum a subgroup, or float32; the last two with one
scale a row: int8, with one sum too, or those float32 that e4m3 has."""
WIDTH = {"bytes": 1, "words": 2, "floats": 4, "int8": 1, "e4m3": 4}
"""Bytes of an activation, and of an unpacked weight."""
STEP = {"bytes": 4, "words": 2, "floats": 1, "int8": 4, "e4m3": 1}
"""Values of a row that one multiplication takes."""
FLOATS = ("floats", "e4m3")
TOKENS = ("int8", "e4m3")
"""Families with one scale a row of activations."""
FEW = 4
"""Rows of activations that are multiplied at once while weights are unpacked in registers, at most."""
DIRECT = {"bytes": 16, "words": 8, "floats": 16, "int8": 8, "e4m3": 16}
"""Rows up to which weights are unpacked for every :data:`FEW` of them. For more, unpacking once is faster."""
CHAIN = 8
"""Products that are added one to another where a decoder's sums are made of parts; a subgroup's parts are
added, then the subgroups."""
MOST_COLUMNS = 1 << 17
"""The most columns of the family ``int8``: that many products of −128 and 127 just fit an int32."""


@dataclass(frozen=True)
class WeightDecoder:
    """A format of weights.

    Attributes:
        name: of the format.
        family: what its unpacked values are multiplied with.
        bytes: that a subgroup of one row takes, in each plane.
        unpack: ``(e, isa, pointer to a subgroup in each plane)`` → for every step along k a vector of
            ``lanes · STEP`` values of each block that is unpacked together.
        rows: that are unpacked together; 0: those of a block.
        parts: whether sums over k are made of parts of :data:`CHAIN` products: of float32 activations, as
            exactly as a library would.
        planes: parts of a weight that lie one after another, each with some bits of all values.
    """

    name: str
    family: Family
    bytes: int
    unpack: Callable[..., Iterator[Sequence[Value]]]
    rows: int = 0
    parts: bool = False
    planes: int = 1

    def together(self, isa: Isa) -> int:
        """Blocks that are unpacked together: their subgroups lie side by side."""
        return self.rows // isa.lanes or 1


@dataclass(frozen=True)
class Matmul:
    """A kernel: a format and how it is scaled.

    Attributes:
        decoder: the format.
        group: values that share a scale: a multiple of 32; 0: a whole row; ``None``: there are no scales.
        scale: how scales are stored, ``bf16`` or ``f32``.
        zeros: whether each group has a zero point: uint8 for the family ``bytes``, whose codes without have
            8; int8 for ``words``, whose codes are signed.
        high: whether 4-bit codes are the high halves of int8: code c means 16 c − 120, the middle of the 16
            int8 that begin so.
    """

    decoder: WeightDecoder
    group: int | None
    scale: Literal["bf16", "f32"] = "f32"
    zeros: bool = False
    high: bool = False

    @property
    def name(self) -> str:
        """The function's name, which contains all that its code depends on."""
        group = {None: "", 0: "_channel"}.get(self.group, f"_g{self.group}")
        return f"matmul_{self.decoder.name}{group}_{self.scale}{'_zp' if self.zeros else ''}" + (
            "_high" if self.high else "")

    def emit(self, isa: Isa) -> Callable[[ir.Module], None]:
        """What writes the kernel into a module."""
        return lambda module: _Writer(module, isa, self).write()


def tile(isa: Isa) -> tuple[int, int]:
    """Blocks and rows of activations that are multiplied at once from scratch memory."""
    return 2, isa.lanes // 2


def scratch_bytes(matmul: Matmul, isa: Isa, subgroups: int) -> int:
    """Scratch memory that a thread needs."""
    blocks = max(tile(isa)[0], matmul.decoder.together(isa))
    return blocks * subgroups * SUB * isa.lanes * WIDTH[matmul.decoder.family]


class _Writer:
    def __init__(self, module: ir.Module, isa: Isa, spec: Matmul) -> None:
        self.e, self.a, self.unit, thread = begin(module, spec.name, ARGUMENTS)
        self.isa, self.spec, a = isa, spec, self.a
        self.decoder, self.family = spec.decoder, spec.decoder.family
        self.lanes, self.reals, self.together = isa.lanes, vec(F32, isa.lanes), self.decoder.together(isa)
        a.x, a.x_scales, a.x_sums = (p + thread * a.x_private for p in (a.x, a.x_scales, a.x_sums))
        a.scratch = a.scratch + thread * a.scratch_private
        self.block_bytes = a.subgroups * (self.decoder.bytes * self.lanes)
        self.plane_bytes = a.stripes * a.subgroups * (self.decoder.bytes * STRIPE)

    def write(self) -> None:
        e, a, lanes = self.e, self.a, self.lanes
        blocks, rows = tile(self.isa)
        unit = self.unit
        across = (a.stripes + a.stripes_a_unit - 1) // a.stripes_a_unit
        first = unit % across * a.stripes_a_unit
        per = STRIPE // lanes
        begin, end = first * per, e.min(first + a.stripes_a_unit, a.stripes) * per
        top = unit // across * a.rows_a_unit
        bottom = e.min(top + a.rows_a_unit, a.rows)
        count = bottom - top
        few, limit = (1, 1) if self.together > 1 else (FEW, DIRECT[self.family])
        with e.either(count <= limit) as otherwise:
            for number in range(1, few):
                with e.when(count.equals(number)), e.loop(begin, end, self._alone(number)) as block:
                    self._multiply(block, top, self._alone(number), number)
            with e.when(count >= few), e.loop(begin, end, self._alone(few)) as block:
                full = count // few * few + top
                with e.loop(top, full, few) as row:
                    self._multiply(block, row, self._alone(few), few)
                for number in range(1, few):
                    with e.when((bottom - full).equals(number)):
                        self._multiply(block, full, self._alone(few), number)
            otherwise()
            size = max(blocks, self.together)
            with e.loop(begin, end, size) as block:
                self._unpack(block, size)
                full = count // rows * rows + top
                with e.loop(0, size, blocks) as first:
                    with e.loop(top, full, rows) as row:
                        self._multiply(block, row, blocks, rows, first)
                    with e.loop(full, bottom) as row:
                        self._multiply(block, row, blocks, 1, first)
        e.ret()

    def _alone(self, rows: int) -> int:
        """Blocks that this number of rows is multiplied by at once, straight from their codes: of floats so
        many that no sum waits for itself."""
        if self.family in FLOATS and self.lanes == 8:
            return 4 if rows == 1 else 2
        return self.together

    def _scratch(self, block: Any, subgroup: Value) -> Value:
        """Where a block's unpacked subgroup lies."""
        size = SUB * self.lanes * WIDTH[self.family]
        place: Value = self.a.subgroups * block + subgroup
        return self.a.scratch + place * size

    def _packed(self, block: Value, subgroup: Value) -> Value:
        size = self.decoder.bytes * self.lanes * self.together
        return self.a.weights + block * self.block_bytes + subgroup * size

    def _planes(self, source: Value) -> list[Value]:
        """Where a subgroup lies in each plane."""
        return [source] + [source + self.plane_bytes * plane for plane in range(1, self.decoder.planes)]

    def _steps(self, sources: Sequence[Value]) -> Iterator[list[Value]]:
        """What lies there, unpacked as it is needed: there are few registers."""
        for parts in zip(*(self.decoder.unpack(self.e, self.isa, *self._planes(source))
                           for source in sources)):
            yield [value for part in parts for value in part]

    def _unpack(self, block: Value, count: int) -> None:
        e = self.e
        with e.loop(0, self.a.subgroups) as s:
            for b in range(0, count, self.together):
                for i, values in enumerate(self._steps([self._packed(block + b, s)])):
                    for j, value in enumerate(values):
                        e.store(self._scratch(b + j, s), value, i * self.lanes * 4)

    def _multiply(self, block: Value, row: Value, blocks: int, rows: int,
                  scratch: Value | None = None) -> None:
        """A tile: ``blocks`` blocks of weights by ``rows`` rows of activations.

        ``block`` is the first; where it was unpacked, ``scratch`` says which of those there it is.
        """
        e, a = self.e, self.a
        unpacked = scratch is not None
        if scratch is not None:
            first, block = scratch, block + scratch
        x = [a.x + (row + m) * a.x_stride for m in range(rows)]
        integers = self.family == "int8"
        start = e.const(vec(I32, self.lanes), 0) if integers else e.const(self.reals, 0.0)
        totals = [[e.var(start) for _ in range(rows)] for _ in range(blocks)]

        steps = SUB // STEP[self.family]

        parts: dict[tuple[int, int], Value] = {}

        def take(i: int, weights: list[Value], factors: list[Value], sums: list[list[Value]]) -> None:
            for m in range(rows):
                for b in range(blocks):
                    if self.decoder.parts:
                        part = weights[b] * factors[m] if i % CHAIN == 0 else e.fma(
                            weights[b], factors[m], parts[b, m])
                        parts[b, m] = part
                        if i % CHAIN == CHAIN - 1:
                            sums[b][m] = part if i < CHAIN else sums[b][m] + part
                    elif self.family in FLOATS:
                        totals[b][m].set(e.fma(weights[b], factors[m], totals[b][m].get()))
                    else:
                        sums[b][m] = self._add(sums[b][m], weights[b], factors[m])

        def loaded(sources: Sequence[Value], i: int) -> list[Value]:
            return [e.load(source, self._kind, i * self.lanes * 4) for source in sources]

        def subgroup(s: Value, scales: Sequence[Value] | None, zeros: Sequence[Value] | None) -> None:
            sources = [self._scratch(first + b, s) for b in range(blocks)] if unpacked else [
                self._packed(block + b, s) for b in range(0, blocks, self.together)]
            sums = [[self._nothing() for _ in range(rows)] for _ in range(blocks)]
            if not unpacked:
                for source in (part for block_source in sources for part in self._planes(block_source)):
                    for line in range(0, self.decoder.bytes * self.lanes * self.together, 64):
                        e.prefetch(source + (AHEAD + line))
                for i, values in enumerate(self._steps(sources)):
                    take(i, values, [self._factor(row_x, s, i) for row_x in x], sums)
            elif self.family in FLOATS:
                for i in range(steps):
                    take(i, loaded(sources, i), [self._factor(row_x, s, i) for row_x in x], sums)
            else:  # some steps at a time: over more of them the compiler runs out of registers
                variables = [[e.var(value) for value in line] for line in sums]
                with e.loop(0, steps * 4, 4 * TOGETHER) as at:
                    now = [[variable.get() for variable in line] for line in variables]
                    for i in range(TOGETHER):
                        take(i, loaded([source + at * self.lanes for source in sources], i),
                             [self._factor(row_x + at, s, i) for row_x in x], now)
                    for b in range(blocks):
                        for m in range(rows):
                            variables[b][m].set(now[b][m])
                sums = [[variable.get() for variable in line] for line in variables]
            if integers or self.decoder.parts:
                for b in range(blocks):
                    for m in range(rows):
                        totals[b][m].set(totals[b][m].get() + sums[b][m])
            elif self.family not in FLOATS:
                for m in range(rows):
                    pairs = [(totals[b][m], sums[b][m]) for b in range(blocks)]
                    self._scale(pairs, row + m, s, scales, zeros)

        if self.spec.group:
            per = self.spec.group // SUB
            with e.loop(0, a.subgroups // per) as group:
                scales = [self._scales(block + b, group, a.subgroups // per) for b in range(blocks)]
                zeros = [self._zeros(block + b, group, a.subgroups // per)
                         for b in range(blocks)] if self.spec.zeros else None
                if per <= 4 and not unpacked:
                    for i in range(per):
                        subgroup(group * per + i, scales, zeros)
                else:
                    with e.loop(0, per) as step:
                        subgroup(group * per + step, scales, zeros)
        else:
            unit = e.const(I64, 1)
            zeros = [self._zeros(block + b, e.const(I64, 0), unit)
                     for b in range(blocks)] if self.spec.zeros else None
            with e.loop(0, a.subgroups) as s:
                subgroup(s, None, zeros)
        for b in range(blocks):
            scale = None
            if self.spec.group == 0:
                scale = self._scales(block + b, e.const(I64, 0), e.const(I64, 1))
            for m in range(rows):
                self._finish(block + b, row + m, totals[b][m].get(), scale)

    @property
    def _kind(self) -> Type:
        """The type of an unpacked vector."""
        return {1: vec(I8, 4 * self.lanes), 2: vec(I16, 2 * self.lanes), 4: self.reals}[WIDTH[self.family]]

    def _nothing(self) -> Value:
        return self.isa.nothing(self.e) if self.family == "bytes" else self.e.const(vec(I32, self.lanes), 0)

    def _factor(self, x: Value, s: Value, step: int) -> Value:
        """The step's values of a row of activations, in every lane."""
        kind: Type = F32 if self.family in FLOATS else I32
        activation = self.e.load(x, kind, s * (SUB * WIDTH[self.family]) + step * 4).spread(self.lanes)
        return activation if self.family in FLOATS else activation.bits(self._kind)

    def _add(self, total: Value, weight: Value, x: Value) -> Value:
        isa = self.isa
        add = {"bytes": isa.bytes_dot, "words": isa.words_dot, "int8": isa.int8_dot}[self.family]
        return add(self.e, total, weight, x)

    def _scale(self, pairs: Sequence[tuple[Var, Value]], row: Value, s: Value, scales: Sequence[Value] | None,
               zeros: Sequence[Value] | None) -> None:
        """Add a subgroup's integer sums to the totals."""
        e, a = self.e, self.a
        at = row * a.x_stride + s * 4
        scale = e.load(a.x_scales, F32, at).spread(self.lanes)
        offset = None
        if self.family == "bytes" or zeros is not None:
            offset = e.load(a.x_sums, I32, at).spread(self.lanes)
        for b, (total, part) in enumerate(pairs):
            if self.family == "bytes":
                part = self.isa.finished(e, part)
            if offset is not None:
                if self.spec.high:
                    part = (part << 4) - offset * 120
                else:
                    part = part - (offset * zeros[b] if zeros is not None else offset << 3)
            if scales is None:
                total.set(e.fma(part.real(), scale, total.get()))
            else:
                total.set(e.fma(part.real() * scale, scales[b], total.get()))

    def _scales(self, block: Value, group: Value, groups: Value) -> Value:
        e, width = self.e, 2 if self.spec.scale == "bf16" else 4
        where = self.a.scales + (block * groups + group) * (self.lanes * width)
        if width == 4:
            return e.load(where, self.reals)
        return e.widened(e.load(where, vec(I16, self.lanes)))

    def _zeros(self, block: Value, group: Value, groups: Value) -> Value:
        where = self.a.zeros + (block * groups + group) * self.lanes
        zeros, wide = self.e.load(where, vec(I8, self.lanes)), vec(I32, self.lanes)
        return zeros.zext(wide) if self.family == "bytes" else zeros.sext(wide)

    def _finish(self, block: Value, row: Value, total: Value, scale: Value | None) -> None:
        e, a = self.e, self.a
        if self.family == "int8":
            if self.isa.offset:
                total = total - e.load(a.x_sums, I32, row * a.x_stride).spread(self.lanes) * self.isa.offset
            total = total.real()
        if self.family in TOKENS:
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
