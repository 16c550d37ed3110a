"""Products by floating-point weights, which lie row after row, as a file has them.

An output is made of chunks of columns, which are added to it in rising order: a residual first, then the
bias, then each chunk times its scales. A chunk is 16 chains of multiply-adds side by side, whose ends are
added, the upper half to the lower one until one number is left. Lane i of a subgroup of 32 columns takes
columns i and i + 16; of bfloat16 weights it takes the odd one of pair i, then the even one, which is what
``vdpbf16ps`` does. So one row of activations has the same bits as many, whatever the threads and the
instructions; only subnormal numbers are 0 to that one.

Few rows of activations wait in a cache while each weight passes once. For many, a chunk of them stays in the
core's second cache, and a few rows of weights in its first.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from quantkit_kernels.cpu.driver import begin
from quantkit_kernels.cpu.isa import Isa
from quantkit_kernels.cpu.product_spec import ARGUMENTS, ProductSpec
from quantkit_kernels.cpu.scales import WIDTHS, widened
from quantkit_kernels.cpu.values import BF16, F32, I16, I64, Value, Var, vec
from quantkit_kernels.cpu.weight_decoder import STRIPE, SUB

LANES = 16
"""Chains of a chunk, whatever the instruction set's lanes are."""
CHUNK = 1024
"""Columns of a chunk, or as many as are whole groups."""
NEAR = 16
"""Rows of weights that stay in the first cache while activations pass."""
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
        self.chunk = max(1, CHUNK // SUB // per) * per
        """Subgroups of a chunk."""
        wide = isa.lanes == LANES
        self.weights = 4 if wide else 2
        """Rows of weights in a tile."""
        self.rows = _rows(spec, wide)
        """Rows of activations in a tile."""

    def bounds(self) -> tuple[Value, Value, Value, Value]:
        """Of the unit: begin and end of rows of weights, then of activations."""
        e, a = self.e, self.a
        across = (a.stripes + a.stripes_a_unit - 1) // a.stripes_a_unit
        first = self.unit % across * a.stripes_a_unit
        top = self.unit // across * a.rows_a_unit
        return (first * STRIPE, e.min(first + a.stripes_a_unit, a.stripes) * STRIPE, top,
                e.min(top + a.rows_a_unit, a.rows))

    def write(self) -> None:
        e, a = self.e, self.a
        begin, end, top, bottom = self.bounds()
        whole = (bottom - top) // self.rows * self.rows + top
        span = e.select(bottom - top <= NEAR, e.const(I64, NEAR), end - begin)
        with e.loop(begin, end, span) as panel:
            panel_end = e.min(panel + span, end)
            with (e.loop(0, a.subgroups, self.chunk) as chunk,
                  e.loop(panel, panel_end, NEAR) as near):
                with e.loop(top, whole, self.rows) as row:
                    self._near(near, row, self.rows, chunk)
                for number in range(1, self.rows):
                    with e.when((bottom - whole).equals(number)):
                        self._near(near, whole, number, chunk)
        e.ret()

    def _near(self, weight: Value, row: Value, rows: int, chunk: Value) -> None:
        with self.e.loop(weight, weight + NEAR, self.weights) as first:
            self._tile(first, row, rows, chunk)

    def _tile(self, weight: Value, row: Value, rows: int, chunk: Value) -> None:
        """Add a chunk's products of some rows of weights by ``rows`` rows of activations to the outputs."""
        e, a, zero = self.e, self.a, self.e.const(self.kind, 0.0)
        sources = [a.weights + (weight + i) * self.row_bytes for i in range(self.weights)]
        factors = [a.x + (row + m) * a.x_stride for m in range(rows)]
        totals = [[e.var(zero) for _ in factors] for _ in sources]
        end = e.min(chunk + self.chunk, a.subgroups)
        if self.spec.group:
            per = self.spec.group // SUB
            with e.loop(chunk, end, per) as start:
                chains = [[e.var(zero) for _ in factors] for _ in sources]
                with e.loop(start, start + per) as s:
                    self._step(s, sources, factors, chains)
                scale = self._group_scale(weight, start // per)
                for line, sums in zip(chains, totals):
                    for chain, total in zip(line, sums):
                        total.set(e.fma(chain.get(), scale, total.get()))
        else:
            with e.loop(chunk, end) as s:
                self._step(s, sources, factors, totals)
        self.add(weight, row, [lane_sums([line[m].get() for line in totals]) for m in range(rows)], chunk)

    def _step(self, s: Value, sources: Sequence[Value], factors: Sequence[Value],
              totals: Sequence[Sequence[Var]]) -> None:
        """Multiply a subgroup."""
        e = self.e
        places = [source + s * self.decoder.bytes for source in sources]
        inputs = [factor + s * (SUB * self.family.width) for factor in factors]
        for place in places:
            e.prefetch(place + AHEAD)
        if self.family.width == 2:
            pairs, raw = vec(BF16, SUB), vec(I16, SUB)
            weights = [e.load(place, raw).bits(pairs) for place in places]
            for m, at in enumerate(inputs):
                x = e.load(at, raw).bits(pairs)
                for line, weight in zip(totals, weights):
                    line[m].set(e.intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", self.kind, line[m].get(),
                                            weight, x))
            return
        for half, parts in enumerate(zip(*(self.decoder.unpack(e, place) for place in places))):
            for m, at in enumerate(inputs):
                x = e.load(at, self.kind, half * LANES * 4)
                for line, part in zip(totals, parts):
                    line[m].set(e.fma(part, x, line[m].get()))

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


def _rows(spec: ProductSpec, wide: bool) -> int:
    """Rows of activations in a tile: as many as registers hold beside the weights."""
    if spec.group:
        return 2 if wide else 1
    if not wide:
        return 3
    return 6 if spec.decoder.family.width == 2 else 5


def lane_sums(vectors: Sequence[Value]) -> Value:
    """The sums of two or four vectors ``[16]``, a lane each, the upper half of each added to the lower one
    until one number is left: their halves lie side by side, so that steps are shared."""
    size = LANES  # of the part of a vector that is one's
    while size > 1:
        half = size // 2
        lower = [start + i for start in range(0, vectors[0].lanes, size) for i in range(half)]
        upper = [place + half for place in lower]
        if len(vectors) == 1:
            vectors = [vectors[0].shuffle(lower) + vectors[0].shuffle(upper)]
        else:
            lanes = vectors[0].lanes
            lower, upper = ([*part, *(lanes + place for place in part)] for part in (lower, upper))
            vectors = [one.shuffle(lower, other) + one.shuffle(upper, other)
                       for one, other in zip(vectors[::2], vectors[1::2])]
        size = half
    return vectors[0]
