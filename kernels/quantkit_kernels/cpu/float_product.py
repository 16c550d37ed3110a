"""Products by floating-point weights, which lie row after row, as a file has them.

An output is made of chunks of columns, which are added to it in rising order: a residual first, then the
bias, then each chunk times its scales. A chunk is 16 chains of multiply-adds side by side, whose ends are
added, the upper half to the lower one until one number is left. Lane i of a subgroup of 32 columns takes
columns i and i + 16; of bfloat16 weights it takes the odd one of pair i, then the even one, which is what
``vdpbf16ps`` does, and ``bfmlalt`` and ``bfmlalb`` together. So one row of activations has the same bits as
many, whatever the threads and the instructions; only subnormal numbers are 0 to the first of these.

Few rows of activations wait in a cache while each weight passes once. For many, a chunk of them stays in the
core's second cache, and a chunk of a few rows of weights in its first.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from quantkit_kernels.cpu.driver import begin
from quantkit_kernels.cpu.isa import Isa
from quantkit_kernels.cpu.product_spec import ARGUMENTS, ProductSpec
from quantkit_kernels.cpu.scales import WIDTHS, widened
from quantkit_kernels.cpu.values import F32, I16, I64, Value, Var, vec
from quantkit_kernels.cpu.weight_decoder import STRIPE, SUB

LANES = 16
"""Chains of a chunk, whatever the instruction set's lanes are."""
CHUNK = 2048
"""Columns of a chunk, at most: a row is cut into as few as possible, of whole groups, all but the last as
long."""
FEW = 16
"""Rows of activations for which each row of weights is read to its end before the next."""
AHEAD = 1024
"""Bytes by which weights are fetched before they are needed."""


class FloatProduct:
    """Emits the kernel of a product by a decoder of a floating-point family."""

    def __init__(self, module: ir.Module, isa: Isa, spec: ProductSpec) -> None:
        self.e, self.a, self.unit, self.thread = begin(module, spec.name, ARGUMENTS)
        self.isa = isa
        self.spec = spec
        self.decoder = spec.decoder
        self.family = spec.decoder.family
        self.a.x = self.a.x + self.thread * self.a.x_private
        self.a.x_scales = self.a.x_scales + self.thread * self.a.x_private
        self.row_bytes = self.a.subgroups * spec.decoder.bytes
        self.kind = vec(F32, LANES)
        per = (spec.group or SUB) // SUB
        limit = max(1, CHUNK // (per * SUB))
        groups = self.a.subgroups // per
        chunks = (groups + (limit - 1)) // limit
        self.chunk = (groups + chunks - 1) // chunks * per
        """Subgroups of a chunk."""
        self.weights, self.rows = _tile_shape(spec, isa)
        """Rows of weights and of activations in a tile."""

    def bounds(self) -> tuple[Value, Value, Value, Value]:
        """Of the unit: begin and end of rows of weights, then of activations."""
        e, a = self.e, self.a
        down = (a.rows + a.rows_a_unit - 1) // a.rows_a_unit
        first = self.unit // down * a.stripes_a_unit  # units side by side read the same weights
        top = self.unit % down * a.rows_a_unit
        return (first * STRIPE, e.min(first + a.stripes_a_unit, a.stripes) * STRIPE, top,
                e.min(top + a.rows_a_unit, a.rows))

    def write(self) -> None:
        e, a = self.e, self.a
        begin, end, top, bottom = self.bounds()
        full = (bottom - top) // self.rows * self.rows + top
        span = e.select(bottom - top <= FEW, e.const(I64, self.weights), end - begin)
        with e.loop(begin, end, span) as panel:
            panel_end = e.min(panel + span, end)
            with (e.loop(0, a.subgroups, self.chunk) as chunk,
                  e.loop(panel, panel_end, self.weights) as weight):
                with e.loop(top, full, self.rows) as row:
                    self._tile(weight, row, self.rows, chunk)
                for number in range(1, self.rows):
                    with e.when((bottom - full).equals(number)):
                        self._tile(weight, full, number, chunk)
        e.ret()

    def _tile(self, weight: Value, row: Value, rows: int, chunk: Value) -> None:
        """Add a chunk's products of some rows of weights by ``rows`` rows of activations to the outputs."""
        e, a, zero = self.e, self.a, self.e.const(self.kind, 0.0)
        sources = [a.weights + (weight + i) * self.row_bytes for i in range(self.weights)]
        inputs = [a.x + (row + m) * a.x_stride for m in range(rows)]
        totals = [[e.var(zero) for _ in inputs] for _ in sources]
        end = e.min(chunk + self.chunk, a.subgroups)
        if self.spec.group:
            per = self.spec.group // SUB
            with e.loop(chunk, end, per) as start:
                chains = [[e.var(zero) for _ in inputs] for _ in sources]
                with e.loop(start, start + per) as s:
                    self._step(s, sources, inputs, chains)
                scale = self._group_scale(weight, start // per)
                for line, sums in zip(chains, totals):
                    for chain, total in zip(line, sums):
                        total.set(e.fma(chain.get(), scale, total.get()))
        else:
            with e.loop(chunk, end) as s:
                self._step(s, sources, inputs, totals)
        self.add(weight, row, [self.e.sums([line[m].get() for line in totals]) for m in range(rows)], chunk)

    def _step(self, s: Value, sources: Sequence[Value], inputs: Sequence[Value],
              totals: Sequence[Sequence[Var]]) -> None:
        """Multiply a subgroup."""
        e = self.e
        places = [source + s * self.decoder.bytes for source in sources]
        inputs = [start + s * (SUB * self.family.width) for start in inputs]
        for place in places:
            e.prefetch(place + AHEAD)
        if self.family.width == 2:
            pairs = vec(I16, SUB)
            factors = [e.load(at, pairs) for at in inputs]
            for line, place in zip(totals, places):
                weight = e.load(place, pairs)
                for total, factor in zip(line, factors):
                    total.set(self.isa.bfloat_dot(e, total.get(), weight, factor))
            return
        if self.weights < self.rows:  # the shorter side stays in registers
            for half, parts in enumerate(zip(*(self.decoder.unpack(e, place) for place in places))):
                for m, at in enumerate(inputs):
                    factor = e.load(at, self.kind, half * LANES * 4)
                    for line, part in zip(totals, parts):
                        line[m].set(e.fma(part, factor, line[m].get()))
            return
        halves = [[e.load(at, self.kind, half * LANES * 4) for at in inputs] for half in range(2)]
        for line, place in zip(totals, places):
            for part, factors in zip(self.decoder.unpack(e, place), halves):
                for total, factor in zip(line, factors):
                    total.set(e.fma(part, factor, total.get()))

    def _group_scale(self, weight: Value, group: Value) -> Value:
        """The scale of a tile of the weight, which as many rows share as the instruction set has lanes."""
        assert self.spec.group and self.spec.scales.shared
        place = weight // self.isa.lanes * (self.a.subgroups * SUB // self.spec.group) + group
        return self.e.load(self.a.scales + place * 4, F32).spread(LANES)

    def add(self, weight: Value, row: Value, sums: Sequence[Value], chunk: Value) -> None:
        """Scale the sums of a chunk, a vector of neighboring outputs of each row, and add them to what is
        there."""
        e, a, count = self.e, self.a, sums[0].lanes
        kind = vec(F32, count)
        rows = range(len(sums))
        places = [a.out + (row + m) * a.out_stride + weight * 4 for m in rows]
        if self.family.by_token:
            sums = [total * e.load(a.x_scales, F32, (row + m) * a.x_stride).spread(count)
                    for m, total in enumerate(sums)]
        if self.spec.group == 0:
            stored = self.spec.scales.stored
            scale = widened(e, stored, a.scales + weight * WIDTHS[stored], count)
            sums = [total * scale for total in sums]
        before = [e.var(e.const(kind, 0.0)) for _ in rows]
        with e.when((chunk | a.add).differs(0)):
            for variable, place in zip(before, places):
                variable.set(e.load(place, kind))
        with e.when(chunk.equals(0)), e.when(e.present(a.bias)):
            bias = e.load(a.bias + weight * 4, kind)
            for variable in before:
                variable.set(variable.get() + bias)
        for variable, place, total in zip(before, places, sums):
            e.store(place, variable.get() + total)


def _tile_shape(spec: ProductSpec, isa: Isa) -> tuple[int, int]:
    """As many rows of weights and of activations as registers hold sums of."""
    if isa.lanes < LANES:
        return (2, 1) if spec.group else (2, 3)
    if spec.group:
        return 4, 2
    return 8, 3 if spec.decoder.family.width == 2 else 2
