"""Attention over pages, decode and prefill alike.

A query's result is a sum over splits of :data:`SPLIT` slots, each with its own maximum, in rising order. So
it has the same bits when a split is one thread's unit, when a prompt's queries go through together, and
however the prompt was cut. https://arxiv.org/abs/2205.14135
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

from llvmlite import ir

from quantkit_kernels.cpu.driver import begin
from quantkit_kernels.cpu.emit import Emitter, exp
from quantkit_kernels.cpu.isa import Isa
from quantkit_kernels.cpu.kv_codecs import PAGE, lanes
from quantkit_kernels.cpu.kv_pages import CACHE, HeadPages, PageCodecs
from quantkit_kernels.cpu.values import F32, I32, I64, Value, vec

SPLIT = 256
"""Slots whose scores share a maximum."""
TILE = 32
"""Slots that are decoded at once; they divide a page."""
LINE = 64
"""Bytes of a cache line."""
WIDE = 16
"""Scores handled at once in a softmax."""
NOTHING = -1e30
"""A maximum over no scores."""
UNBOUNDED = 2**31 - 1
"""A window or limit that there isn't."""
ATTEND_ARGUMENTS = (*CACHE, "*q", "*out", "*tiles", "*scratch", "*partial", "q_stride", "out_stride", "group",
                    "window", "limit", "sinks", "splits", "scratch_private", "*sink_scores", "*sees")
"""``tiles`` int64 ``[T, 3]``: first row, rows, sequence; ``splits``: units that a tile's head has, 1: all of
its splits are one unit; ``partial``: float32 ``[rows, query heads, splits, D + 2]`` if there are more;
``sink_scores``: float32 ``[query heads]``, scores of no key, https://arxiv.org/abs/2508.10925; null: none;
``sees``: int64 ``[rows]``, the place in the step of the last token that a row sees, the same in all of a
tile; null: each sees as far as itself."""
REDUCE_ARGUMENTS = ("*partial", "*out", "out_stride", "query_heads", "splits", "*sink_scores")


def scratch_bytes(dim: int, queries: int) -> int:
    """Scratch memory that a thread needs for ``queries`` (rows · group) at once."""
    return 4 * (TILE * dim + SPLIT + queries * (SPLIT + 2 * dim + 4)) + 256


@dataclass(frozen=True)
class Attend:
    """A tile of a sequence's rows over its pages; a unit is a key head (or one split of it) of a tile."""

    codecs: PageCodecs
    dim: int
    arguments: ClassVar[Sequence[str]] = ATTEND_ARGUMENTS

    @property
    def name(self) -> str:
        return f"attend_{self.codecs.name}_d{self.dim}"

    def emit(self, module: ir.Module, isa: Isa) -> None:
        e, a, unit, thread = begin(module, self.name, ATTEND_ARGUMENTS)
        _Attend(e, a, self.codecs, self.dim, isa).write(unit, thread)


class _Attend:
    def __init__(self, e: Emitter, a: SimpleNamespace, codecs: PageCodecs, dim: int, isa: Isa) -> None:
        self.e, self.a, self.codecs, self.dim, self.width = e, a, codecs, dim, lanes(dim)
        self.span = 8 * isa.lanes if isa.lanes == 16 else 4 * isa.lanes  # sums of two queries in registers

    def write(self, unit: Value, thread: Value) -> None:
        e, a = self.e, self.a
        split, pair = unit % a.splits, unit // a.splits
        self.head = pair % a.heads
        tile = a.tiles + pair // a.heads * 24
        first, count, sequence = (e.load(tile, I64, 8 * i) for i in range(3))
        self.held = HeadPages(e, a, self.codecs, self.dim, sequence, self.head)
        self.tile = a.scratch + thread * a.scratch_private
        if not self.codecs.residual:
            self._rows(first, count, split)
            e.ret()
            return
        done = e.var(e.const(I64, 0))
        with e.forever() as leave:
            leave(done.get() >= count)
            # queries that read the same slots as codes: those of one page
            begin = first + done.get()
            sees = self._last(begin) + 1
            self.border = self.held.border(sees)
            count_now = e.min(count - done.get(), e.const(I64,
                                                          PAGE) - ((sees - a.residual_length) & (PAGE - 1)))
            self._rows(begin, count_now, split)
            done.set(done.get() + count_now)
        e.ret()

    def _rows(self, first: Value, count: Value, split: Value) -> None:
        """Attend for the queries of the given rows."""
        e, a, size = self.e, self.a, self.dim * 4
        self.first, self.queries = first, count * a.group
        self.places = self.tile + TILE * size
        self.scores = self.places + SPLIT * 4
        self.sums = self.scores + self.queries * (SPLIT * 4)  # of a split, unscaled
        self.running = self.sums + self.queries * size  # over splits
        self.most = self.running + self.queries * size
        self.limit = end = self._last(self.first + count - 1) + 1
        with e.either(a.splits.equals(1)) as otherwise:
            with e.loop(0, self.queries) as q:
                for at in range(0, self.dim, self.width):
                    e.store(self.running + q * size, e.const(vec(F32, self.width), 0.0), at * 4)
                _begin(e, self.most + q * 16, a.sink_scores, self._place(q)[1])
            with e.loop(self._start(), end, SPLIT) as begin:
                self._split(begin, e.min(begin + SPLIT, end))
                with e.loop(0, self.queries) as q, e.when(e.load(self.most, F32, q * 16 + 8) > NOTHING):
                    _merge(e, self.dim, self.running + q * size, self.most + q * 16, self.sums + q * size,
                           self.most + (q * 16 + 8))
            with e.loop(0, self.queries) as q:
                _divide(e, self.dim, self.running + q * size, self.most + q * 16, self._out(q))
            otherwise()
            begin = split * SPLIT
            inside = (begin < end) & (begin >= self._start())
            with e.either(inside) as beyond:
                self._split(begin, e.min(begin + SPLIT, end))
                with e.loop(0, self.queries) as q:
                    where = self._partial(q, split)
                    for i in range(2):
                        e.store(where, e.load(self.most, F32, q * 16 + 8 + 4 * i), 4 * i)
                    for at in range(0, self.dim, self.width):
                        e.store(where, e.load(self.sums + q * size, vec(F32, self.width), at * 4), 8 + at * 4)
                beyond()
                with e.loop(0, self.queries) as q:
                    e.store(self._partial(q, split), e.const(F32, NOTHING))

    def _last(self, row: Value) -> Value:
        """The last slot that a row sees."""
        e, a = self.e, self.a
        place = e.var(e.load(a.rows, I64, row * 24 + 8))
        with e.when(e.present(a.sees)):
            place.set(e.load(a.sees, I64, row * 8))
        return self.held.length + place.get()

    def _start(self) -> Value:
        """The first split that any of the tile's queries sees, where slots are positions."""
        e, a = self.e, self.a
        start = e.var(e.const(I64, 0))
        with e.when(a.limit.equals(UNBOUNDED)):
            position = e.load(a.rows, I64, self.first * 24 + 16)
            start.set(e.max(position - a.window + 1, e.const(I64, 0)) // SPLIT * SPLIT)
        # pages of codes may be none at all; those that wait have this step's own tokens
        with e.when(e.present(a.residual_positions if self.codecs.residual else a.positions)):
            start.set(0)
        return start.get()

    def _place(self, q: Value) -> tuple[Value, Value]:
        """Row and query head of query q of the tile: rows, then the heads of the group."""
        group = self.a.group
        return self.first + q // group, self.head * group + q % group

    def _query(self, q: Value) -> Value:
        row, place = self._place(q)
        return self.a.q + row * self.a.q_stride + place * (self.dim * 4)

    def _out(self, q: Value) -> Value:
        row, place = self._place(q)
        return self.a.out + row * self.a.out_stride + place * (self.dim * 4)

    def _partial(self, q: Value, split: Value) -> Value:
        a = self.a
        row, place = self._place(q)
        return a.partial + ((row * a.heads * a.group + place) * a.splits + split) * ((self.dim + 2) * 4)

    def _split(self, begin: Value, end: Value) -> None:
        """Scores, softmax and sums of the slots ``[begin, end)``; maxima and weights' sums beside."""
        e, size = self.e, self.dim * 4
        with e.loop(begin, end, TILE) as at:
            count = e.min(end - at, e.const(I64, TILE))
            self._decode("k", at, count, True)
            for q, together in self._pairs():
                self._score(q, together, self.scores + q * (SPLIT * 4) + (at - begin) * 4, count)
        with e.loop(0, self.queries) as q:
            self._softmax(q, begin, end)
            for at_ in range(0, self.dim, self.width):
                e.store(self.sums + q * size, e.const(vec(F32, self.width), 0.0), at_ * 4)
        with e.loop(begin, end, TILE) as at:
            count = e.min(end - at, e.const(I64, TILE))
            self._decode("v", at, count, False)
            for q, together in self._pairs():
                self._add(q, together, self.scores + q * (SPLIT * 4) + (at - begin) * 4, count)

    def _decode(self, side: str, at: Value, count: Value, places: bool) -> None:
        """The slots of a page as float32 in the tile; on the way also their positions."""
        e, a = self.e, self.a
        where = self.places + (at & (SPLIT - 1)) * 4
        if not self.codecs.residual:
            base = self.held.slot(at)
            self._codes(side, at, base, count, self.limit)
            if places:
                self._positions(a.positions, base, where, at, count)
            return
        with e.either((at >= a.first) & (at < self.border)) as otherwise:
            base = self.held.slot(at)
            self._codes(side, at, base, count, self.border)
            if places:
                self._positions(a.positions, base, where, at, count)
            otherwise()
            base = self.held.residual(at)
            with e.loop(0, count) as i:
                self._keep(i, self.codecs.vectors.load(e, self.held.vector(side, base + i), self.dim, []))
            if places:
                self._positions(a.residual_positions, base, where, at, count)

    def _codes(self, side: str, at: Value, base: Value, count: Value, end: Value) -> None:
        """Decode, and fetch the next page's keys, which lie anywhere, and this one's values."""
        e, codec = self.e, self.codecs.side(side)
        common = codec.common(e, self.held.shared(side, base), (at & (PAGE - 1)) // TILE, self.dim)
        ahead = self.held.slot(e.min(at + PAGE, end - 1) & -PAGE) + (at & (PAGE - 1)) if side == "k" else base

        def fetch(i: Value, slots: int) -> None:
            if side == "k":
                self._fetch("v", base + i, slots)
                with e.when(at + i + PAGE < end):
                    self._fetch("k", ahead + i, slots)

        fetch(e.const(I64, 0), TILE)
        with e.loop(0, count) as i:
            fetch(i, 1)
            self._keep(i, codec.load(e, self.held.parts(side, base + i), self.dim, common))

    def _keep(self, i: Value, values: list[Value]) -> None:
        for j, value in enumerate(values):
            self.e.store(self.tile + i * (self.dim * 4), value, j * self.width * 4)

    def _positions(self, source: Value, base: Value, where: Value, at: Value, count: Value) -> None:
        e = self.e
        with e.either(e.present(source)) as otherwise:
            with e.loop(0, count) as i:
                e.store(where + i * 4, e.load(source, I32, (base + i) * 4))
            otherwise()
            steps = e.const(vec(I32, WIDE), list(range(WIDE)))
            with e.loop(0, TILE, WIDE) as i:
                e.store(where + i * 4, (at + i).trunc(I32).spread(WIDE) + steps)

    def _fetch(self, side: str, slot: Value, slots: int) -> None:
        """Fetch a slot's parts of whole cache lines, or those parts of some slots that share lines."""
        sizes = self.codecs.side(side).bytes(self.dim)
        for name, pointer in self.held.parts(side, slot).items():
            if (sizes[name] < LINE) == (slots > 1):
                for line in range(0, sizes[name] * slots, LINE):
                    self.e.prefetch(pointer + line)

    def _pairs(self) -> Iterator[tuple[Value, int]]:
        """The queries by twos, then one that is left: what is loaded of the tile then serves both."""
        e = self.e
        with e.loop(0, self.queries & -2, 2) as q:
            yield q, 2
        with e.when((self.queries & 1).equals(1)):
            yield self.queries - 1, 1

    def _score(self, q: Value, together: int, out: Value, count: Value) -> None:
        """Queries' products with the tile's keys, eight at a time; none behind the last is ever seen."""
        e, kind = self.e, vec(F32, self.width)
        ats = range(0, self.dim, self.width)
        queries = [[e.load(self._query(q + m), kind, at * 4) for at in ats] for m in range(together)]
        with e.loop(0, count, 8) as key:
            totals: list[list[Value]] = [[] for _ in queries]
            for i in range(8):
                row = self.tile + (key + i) * (self.dim * 4)
                parts = [e.load(row, kind, at * 4) for at in ats]
                for query, products in zip(queries, totals):
                    total = query[0] * parts[0]
                    for part, other in zip(parts[1:], query[1:]):
                        total = e.fma(other, part, total)
                    products.append(total)
            sums = e.sums([total for products in totals for total in products])
            for m in range(together):
                part = sums.shuffle(range(8 * m, 8 * m + 8)) if together > 1 else sums
                e.store(out + m * (SPLIT * 4) + key * 4, part)

    def _softmax(self, q: Value, begin: Value, end: Value) -> None:
        """Scores become ``exp(score - maximum)``, 0 where the query doesn't see; the sum of these is kept."""
        e, a = self.e, self.a
        wide, integers = vec(F32, WIDE), vec(I32, WIDE)
        row = self.first + q // a.group
        position = e.load(a.rows, I64, row * 24 + 16)
        last = self._last(row)
        query = position.trunc(I32).spread(WIDE)
        scores = self.scores + q * (SPLIT * 4)
        steps = e.const(integers, list(range(WIDE)))
        count = e.min(end, last + 1) - begin

        def seen(i: Value) -> Value:
            place = e.load(self.places, integers, i * 4)
            slot = (begin + i).trunc(I32).spread(WIDE) + steps
            visible = (slot <= last.trunc(I32).spread(WIDE)) & (
                query - place < a.window.trunc(I32).spread(WIDE))
            near = query - place < a.limit.trunc(I32).spread(WIDE)
            return visible & (near | (place < a.sinks.trunc(I32).spread(WIDE)))

        maximum = e.var(e.const(wide, NOTHING))
        # without limits all of them are seen but those behind the query, which are in the last step
        free = e.var(e.const(I64, 0))
        with e.when(a.window.equals(UNBOUNDED)), e.when(a.limit.equals(UNBOUNDED)):
            free.set(e.max(count, e.const(I64, 0)) & -WIDE)
        with e.loop(0, free.get(), WIDE) as i:
            maximum.set(e.max(maximum.get(), e.load(scores, wide, i * 4)))
        with e.loop(free.get(), count, WIDE) as i:
            score = e.select(seen(i), e.load(scores, wide, i * 4), e.const(wide, NOTHING))
            e.store(scores, score, i * 4)
            maximum.set(e.max(maximum.get(), score))
        top = e.highest(maximum.get())
        total = e.var(e.const(wide, 0.0))
        with e.loop(0, count, WIDE) as i:
            score = e.load(scores, wide, i * 4)
            weight = e.select(score > NOTHING, exp(e, score - top.spread(WIDE)), e.const(wide, 0.0))
            e.store(scores, weight, i * 4)
            total.set(total.get() + weight)
        # what this query doesn't see but a later one of the tile does
        with e.loop((e.max(count, e.const(I64, 0)) + (WIDE - 1)) // WIDE * WIDE, end - begin, WIDE) as i:
            e.store(scores, e.const(wide, 0.0), i * 4)
        e.store(self.most + q * 16, top, 8)
        e.store(self.most + q * 16, e.sum(total.get()), 12)

    def _add(self, q: Value, together: int, weights: Value, count: Value) -> None:
        """The tile's values by their weights, added to the split's sums."""
        e, kind, size = self.e, vec(F32, self.width), self.dim * 4
        for low in range(0, self.dim, self.span):
            ats = range(low, min(low + self.span, self.dim), self.width)
            sums = [self.sums + (q + m) * size for m in range(together)]
            totals = [[e.var(e.load(where, kind, at * 4)) for at in ats] for where in sums]
            with e.loop(0, count) as key:
                factors = [e.load(weights + m * (SPLIT * 4), F32, key * 4).spread(self.width)
                           for m in range(together)]
                for i, at in enumerate(ats):
                    value = e.load(self.tile + key * size, kind, at * 4)
                    for factor, variables in zip(factors, totals):
                        variables[i].set(e.fma(factor, value, variables[i].get()))
            for where, variables in zip(sums, totals):
                for at, total in zip(ats, variables):
                    e.store(where, total.get(), at * 4)


@dataclass(frozen=True)
class ReduceSplits:
    """Splits that were units of their own become one result; a unit is a query head of a row."""

    dim: int
    arguments: ClassVar[Sequence[str]] = REDUCE_ARGUMENTS

    @property
    def name(self) -> str:
        return f"reduce_splits_d{self.dim}"

    def emit(self, module: ir.Module, isa: Isa) -> None:
        e, a, unit, _ = begin(module, self.name, REDUCE_ARGUMENTS)
        size, width = (self.dim + 2) * 4, lanes(self.dim)
        out = a.out + unit // a.query_heads * a.out_stride + unit % a.query_heads * (self.dim * 4)
        partial = a.partial + unit * a.splits * size
        state = e.room(8)
        for at in range(0, self.dim, width):
            e.store(out, e.const(vec(F32, width), 0.0), at * 4)
        _begin(e, state, a.sink_scores, unit % a.query_heads)
        with e.loop(0, a.splits) as split:
            partial_state = partial + split * size
            with e.when(e.load(partial_state, F32) > NOTHING):
                _merge(e, self.dim, out, state, partial_state + 8, partial_state)
        _divide(e, self.dim, out, state, out)
        e.ret()


def _begin(e: Emitter, state: Value, sink_scores: Value, head: Value) -> None:
    """The maximum and the sum of weights over no key: of the head's own score, if it has one."""
    e.store(state, e.const(F32, NOTHING))
    e.store(state, e.const(F32, 0.0), 4)
    with e.when(e.present(sink_scores)):
        e.store(state, e.load(sink_scores, F32, head * 4))
        e.store(state, e.const(F32, 1.0), 4)


def _merge(e: Emitter, dim: int, running: Value, state: Value, sums: Value, maximum: Value) -> None:
    """Add a split: ``state`` and ``maximum`` point to a maximum and a sum of weights."""
    old, new = e.load(state, F32), e.load(maximum, F32)
    top = e.max(old, new)
    keep, take = exp(e, old - top), exp(e, new - top)
    e.store(state, top)
    e.store(state, e.fma(e.load(maximum, F32, 4), take, e.load(state, F32, 4) * keep), 4)
    width = lanes(dim)
    for at in range(0, dim, width):
        totals, added = (e.load(p, vec(F32, width), at * 4) for p in (running, sums))
        e.store(running, e.fma(added, take.spread(width), totals * keep.spread(width)), at * 4)


def _divide(e: Emitter, dim: int, running: Value, state: Value, out: Value) -> None:
    width = lanes(dim)
    inverse = e.const(F32, 1.0) / e.load(state, F32, 4)
    for at in range(0, dim, width):
        e.store(out, e.load(running, vec(F32, width), at * 4) * inverse.spread(width), at * 4)
