"""Attention over pages: rotation and cache write, decode and prefill alike.

A query's result is a sum over splits of :data:`SPLIT` slots, each with its own maximum, in rising order. So
it has the same bits when a split is one thread's unit, when a prompt's queries go through together, and
however the prompt was cut. https://arxiv.org/abs/2205.14135
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

from llvmlite import ir

from quantkit_kernels.cpu.driver import begin
from quantkit_kernels.cpu.emit import Emitter
from quantkit_kernels.cpu.exp import exp
from quantkit_kernels.cpu.kv_codecs import CODECS, PAGE, PARTS, lanes
from quantkit_kernels.cpu.values import F32, I32, I64, PTR, Value, vec

SPLIT = 256
"""Slots whose scores share a maximum."""
TILE = 32
"""Slots that are decoded at once; they divide a page."""
WIDE = 16
"""Scores handled at once in a softmax."""
NOTHING = -1e30
"""A maximum over no scores."""
UNBOUNDED = 2**31 - 1
"""A window or limit that there isn't."""
CACHE = (*(f"*{side}_{part}" for side in "kv" for part in PARTS), "*positions", "*rows", "*sequences",
         "layer", "heads")
"""Arguments that say where keys and values lie: the layer's pages; ``rows`` int64 ``[M, 3]``: sequence,
place in this step, position; ``sequences`` int64 ``[B, 3]``: pointer to page numbers int32 ``[layers, heads,
width]``, width, pointer to slots held before this step int32 ``[layers, heads]``; ``positions``: null if a
slot's number is its position; ``heads``: of keys."""
ROPE_ARGUMENTS = (*CACHE, "*q", "*k", "*v", "*cos", "*sin", "*q_norm", "*k_norm", "q_stride", "kv_stride",
                  "group", "eps")
"""``cos`` and ``sin``: float32 ``[positions, D / 2]``; norms: float32 ``[D]`` or null; ``eps``: a float32's
bits."""
ATTEND_ARGUMENTS = (*CACHE, "*q", "*out", "*tiles", "*scratch", "*partial", "q_stride", "out_stride", "group",
                    "window", "limit", "sinks", "splits", "scratch_private")
"""``tiles`` int64 ``[T, 3]``: first row, rows, sequence; ``splits``: units that a tile's head has, 1: all of
its splits are one unit; ``partial``: float32 ``[rows, query heads, splits, D + 2]`` if there are more."""
COMBINE_ARGUMENTS = ("*partial", "*out", "out_stride", "query_heads", "splits")


def scratch_bytes(dim: int, queries: int) -> int:
    """Scratch memory that a thread needs for so many queries (rows · group) at once."""
    return 4 * (TILE * dim + SPLIT + queries * (SPLIT + 2 * dim + 4)) + 256


def _slot(e: Emitter, a: SimpleNamespace, sequence: Value, head: Value) -> tuple[Value, Value]:
    """Of a sequence: pointer to a head's page numbers, and how many slots it held before this step."""
    one = a.sequences + sequence * 24
    index = a.layer * a.heads + head
    table = e.load(one, PTR) + index * e.load(one, I64, 8) * 4
    return table, e.load(e.load(one, PTR, 16) + index * 4, I32).sext(I64)


def _parts(e: Emitter, a: SimpleNamespace, codec: str, dim: int, side: str, slot: Value) -> dict[str, Value]:
    """Pointers to what a slot holds."""
    sizes = CODECS[codec].bytes(dim)
    return {name: getattr(a, f"{side}_{name}") + slot * size for name, size in sizes.items()}


def _place(e: Emitter, table: Value, index: Value) -> Value:
    """The slot's number among all pages."""
    page = e.load(table, I32, (index >> 6) * 4).sext(I64)
    return page * PAGE + (index & (PAGE - 1))


@dataclass(frozen=True)
class RopeStore:
    """Normalize and rotate a row's queries in place, and its key; encode and store key and value.

    A unit is a key head of a row. Queries are also divided by √D. https://arxiv.org/abs/2104.09864
    """

    codec: str
    dim: int

    @property
    def name(self) -> str:
        """Of the function."""
        return f"rope_store_{self.codec}_d{self.dim}"

    def emit(self, module: ir.Module) -> None:
        """Write the kernel into a module."""
        e, a, unit, _ = begin(module, self.name, ROPE_ARGUMENTS)
        row, head = unit // a.heads, unit % a.heads
        sequence, place, position = (e.load(a.rows, I64, row * 24 + 8 * i) for i in range(3))
        half = self.dim // 2
        angle = [e.load(p, vec(F32, half), position * (half * 4)) for p in (a.cos, a.sin)]
        eps = a.eps.trunc(I32).bits(F32)
        with e.loop(0, a.group) as one:
            q = a.q + row * a.q_stride + (head * a.group + one) * (self.dim * 4)
            self._turn(e, q, angle, a.q_norm, eps, self.dim**-0.5)
        k, v = (p + row * a.kv_stride + head * (self.dim * 4) for p in (a.k, a.v))
        self._turn(e, k, angle, a.k_norm, eps, None)
        table, held = _slot(e, a, sequence, head)
        slot = _place(e, table, held + place)
        width = lanes(self.dim)
        for side, source in (("k", k), ("v", v)):
            values = [e.load(source, vec(F32, width), at * 4) for at in range(0, self.dim, width)]
            CODECS[self.codec].store(e, _parts(e, a, self.codec, self.dim, side, slot), values)
        with e.when(e.present(a.positions)):
            e.store(a.positions, position.trunc(I32), slot * 4)
        e.ret()

    def _turn(self, e: Emitter, x: Value, angle: Sequence[Value], norm: Value, eps: Value,
              scale: float | None) -> None:
        half, width = self.dim // 2, lanes(self.dim)
        with e.when(e.present(norm)):
            total = e.const(vec(F32, width), 0.0)
            parts = [e.load(x, vec(F32, width), at * 4) for at in range(0, self.dim, width)]
            for part in parts:
                total = e.fma(part, part, total)
            factor = e.const(F32, 1.0) / e.sqrt(e.sum(total) / float(self.dim) + eps)
            for i, part in enumerate(parts):
                weight = e.load(norm, vec(F32, width), i * width * 4)
                e.store(x, part * factor.spread(width) * weight, i * width * 4)
        cos, sin = angle
        first, second = e.load(x, vec(F32, half)), e.load(x, vec(F32, half), half * 4)
        new = [first * cos - second * sin, second * cos + first * sin]
        for i, value in enumerate(new):
            e.store(x, value if scale is None else value * scale, i * half * 4)


@dataclass(frozen=True)
class Attend:
    """A tile of a sequence's rows over its pages; a unit is a key head (or one split of it) of a tile."""

    codec: str
    dim: int

    @property
    def name(self) -> str:
        """Of the function."""
        return f"attend_{self.codec}_d{self.dim}"

    def emit(self, module: ir.Module) -> None:
        """Write the kernel into a module."""
        e, a, unit, thread = begin(module, self.name, ATTEND_ARGUMENTS)
        _Attend(e, a, self.codec, self.dim).write(unit, thread)


class _Attend:
    def __init__(self, e: Emitter, a: SimpleNamespace, codec: str, dim: int) -> None:
        self.e, self.a, self.codec, self.dim = e, a, codec, dim

    def write(self, unit: Value, thread: Value) -> None:
        e, a = self.e, self.a
        self.width, size = lanes(self.dim), self.dim * 4
        split, pair = unit % a.splits, unit // a.splits
        self.head = head = pair % a.heads
        tile = a.tiles + pair // a.heads * 24
        self.first, count, sequence = (e.load(tile, I64, 8 * i) for i in range(3))
        self.queries = count * a.group
        self.table, held = _slot(e, a, sequence, head)
        scratch = a.scratch + thread * a.scratch_private
        self.tile = scratch
        self.places = self.tile + TILE * size
        self.scores = self.places + SPLIT * 4
        self.sums = self.scores + self.queries * (SPLIT * 4)  # of a split, unscaled
        self.running = self.sums + self.queries * size  # over splits
        self.most = self.running + self.queries * size
        self.least_place = e.load(a.rows, I64, self.first * 24 + 8)
        self.held = held
        self.limit = end = held + e.load(a.rows, I64, (self.first + count - 1) * 24 + 8) + 1
        with e.either(a.splits.equals(1)) as otherwise:
            with e.loop(0, self.queries) as q:
                for at in range(0, self.dim, self.width):
                    e.store(self.running + q * size, e.const(vec(F32, self.width), 0.0), at * 4)
                e.store(self.most + q * 16, e.const(F32, NOTHING))
                e.store(self.most + q * 16, e.const(F32, 0.0), 4)
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
        e.ret()

    def _start(self) -> Value:
        """The first split that any of the tile's queries sees, where slots are positions."""
        e, a = self.e, self.a
        start = e.var(e.const(I64, 0))
        with e.when(a.limit.equals(UNBOUNDED)):
            position = e.load(a.rows, I64, self.first * 24 + 16)
            start.set(e.max(position - a.window + 1, e.const(I64, 0)) // SPLIT * SPLIT)
        with e.when(e.present(a.positions)):
            start.set(0)
        return start.get()

    def _place(self, q: Value) -> tuple[Value, Value]:
        """Row and query head of query q of the tile: rows, then the heads of the group."""
        group = self.a.group
        return self.first + q // group, self.head * group + q % group

    def _query(self, q: Value) -> Value:
        row, one = self._place(q)
        return self.a.q + row * self.a.q_stride + one * (self.dim * 4)

    def _out(self, q: Value) -> Value:
        row, one = self._place(q)
        return self.a.out + row * self.a.out_stride + one * (self.dim * 4)

    def _partial(self, q: Value, split: Value) -> Value:
        a = self.a
        row, one = self._place(q)
        return a.partial + ((row * a.heads * a.group + one) * a.splits + split) * ((self.dim + 2) * 4)

    def _split(self, begin: Value, end: Value) -> None:
        """Scores, softmax and sums of the slots ``[begin, end)``; maxima and weights' sums beside."""
        e, size = self.e, self.dim * 4
        with e.loop(begin, end, TILE) as at:
            count = e.min(end - at, e.const(I64, TILE))
            self._decode("k", at, count, True)
            with e.loop(0, self.queries) as q:
                self._score(q, self.scores + q * (SPLIT * 4) + (at - begin) * 4, count)
        with e.loop(0, self.queries) as q:
            self._softmax(q, begin, end)
            for at_ in range(0, self.dim, self.width):
                e.store(self.sums + q * size, e.const(vec(F32, self.width), 0.0), at_ * 4)
        with e.loop(begin, end, TILE) as at:
            count = e.min(end - at, e.const(I64, TILE))
            self._decode("v", at, count, False)
            with e.loop(0, self.queries) as q:
                self._add(q, self.scores + q * (SPLIT * 4) + (at - begin) * 4, count)

    def _decode(self, side: str, at: Value, count: Value, places: bool) -> None:
        """The slots of a page as float32 in the tile; on the way also their positions."""
        e, a = self.e, self.a
        base = _place(e, self.table, at)
        if side == "k":
            ahead = _place(e, self.table, e.min(at + PAGE, self.limit - 1) & -PAGE)
            self.next_page = ahead + (at & (PAGE - 1))
        with e.loop(0, count) as i:
            parts = _parts(e, a, self.codec, self.dim, side, base + i)
            if side == "k":  # values of the same page come next, and pages lie anywhere
                self._fetch("v", base + i)
                with e.when(at + i + PAGE < self.limit):
                    self._fetch("k", self.next_page + i)
            for j, value in enumerate(CODECS[self.codec].load(e, parts, self.dim)):
                e.store(self.tile + i * (self.dim * 4), value, j * self.width * 4)
        if places:
            where = self.places + (at & (SPLIT - 1)) * 4
            with e.either(e.present(a.positions)) as otherwise:
                with e.loop(0, count) as i:
                    e.store(where + i * 4, e.load(a.positions, I32, (base + i) * 4))
                otherwise()
                steps = e.const(vec(I32, WIDE), list(range(WIDE)))
                with e.loop(0, TILE, WIDE) as i:
                    e.store(where + i * 4, (at + i).trunc(I32).spread(WIDE) + steps)

    def _fetch(self, side: str, slot: Value) -> None:
        for name, pointer in _parts(self.e, self.a, self.codec, self.dim, side, slot).items():
            for line in range(0, CODECS[self.codec].bytes(self.dim)[name], 64):
                self.e.prefetch(pointer + line)

    def _score(self, q: Value, out: Value, count: Value) -> None:
        """A query's products with the tile's keys, eight at a time; none behind the last is ever seen."""
        e, kind = self.e, vec(F32, self.width)
        query = self._query(q)
        parts = [e.load(query, kind, at * 4) for at in range(0, self.dim, self.width)]
        with e.loop(0, count, 8) as key:
            totals = []
            for i in range(8):
                row = self.tile + (key + i) * (self.dim * 4)
                total = parts[0] * e.load(row, kind)
                for j, part in enumerate(parts[1:], 1):
                    total = e.fma(part, e.load(row, kind, j * self.width * 4), total)
                totals.append(total)
            e.store(out + key * 4, e.sums(totals))

    def _softmax(self, q: Value, begin: Value, end: Value) -> None:
        """Scores become ``exp(score - maximum)``, 0 where the query doesn't see; the sum of these is kept."""
        e, a = self.e, self.a
        wide, whole = vec(F32, WIDE), vec(I32, WIDE)
        row = self.first + q // a.group
        position = e.load(a.rows, I64, row * 24 + 16)
        last = self.held + e.load(a.rows, I64, row * 24 + 8)  # the query's own slot
        here = position.trunc(I32).spread(WIDE)
        scores = self.scores + q * (SPLIT * 4)
        steps = e.const(whole, list(range(WIDE)))
        count = e.min(end, last + 1) - begin

        def seen(i: Value) -> Value:
            place = e.load(self.places, whole, i * 4)
            slot = (begin + i).trunc(I32).spread(WIDE) + steps
            found = (slot <= last.trunc(I32).spread(WIDE)) & (here - place < a.window.trunc(I32).spread(WIDE))
            near = here - place < a.limit.trunc(I32).spread(WIDE)
            return found & (near | (place < a.sinks.trunc(I32).spread(WIDE)))

        most = e.var(e.const(wide, NOTHING))
        # without limits all of them are seen but those behind the query, which are in the last step
        free = e.var(e.const(I64, 0))
        with e.when(a.window.equals(UNBOUNDED)), e.when(a.limit.equals(UNBOUNDED)):
            free.set(e.max(count, e.const(I64, 0)) & -WIDE)
        with e.loop(0, free.get(), WIDE) as i:
            most.set(e.max(most.get(), e.load(scores, wide, i * 4)))
        with e.loop(free.get(), count, WIDE) as i:
            score = e.select(seen(i), e.load(scores, wide, i * 4), e.const(wide, NOTHING))
            e.store(scores, score, i * 4)
            most.set(e.max(most.get(), score))
        top = e.highest(most.get())
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

    def _add(self, q: Value, weights: Value, count: Value) -> None:
        """The tile's values by their weights, added to the split's sums."""
        e, kind = self.e, vec(F32, self.width)
        for low in range(0, self.dim, 64):
            ats = range(low, min(low + 64, self.dim), self.width)
            sums = self.sums + q * (self.dim * 4)
            held = [e.var(e.load(sums, kind, at * 4)) for at in ats]
            with e.loop(0, count) as key:
                weight = e.load(weights, F32, key * 4).spread(self.width)
                for one, at in zip(held, ats):
                    value = e.load(self.tile + key * (self.dim * 4), kind, at * 4)
                    one.set(e.fma(weight, value, one.get()))
            for one, at in zip(held, ats):
                e.store(sums, one.get(), at * 4)


@dataclass(frozen=True)
class Combine:
    """Splits that were units of their own become one result; a unit is a query head of a row."""

    dim: int

    @property
    def name(self) -> str:
        """Of the function."""
        return f"combine_d{self.dim}"

    def emit(self, module: ir.Module) -> None:
        """Write the kernel into a module."""
        e, a, unit, _ = begin(module, self.name, COMBINE_ARGUMENTS)
        size, width = (self.dim + 2) * 4, lanes(self.dim)
        out = a.out + unit // a.query_heads * a.out_stride + unit % a.query_heads * (self.dim * 4)
        partial = a.partial + unit * a.splits * size
        state = e.room(8)
        for at in range(0, self.dim, width):
            e.store(out, e.const(vec(F32, width), 0.0), at * 4)
        e.store(state, e.const(F32, NOTHING))
        e.store(state, e.const(F32, 0.0), 4)
        with e.loop(0, a.splits) as split:
            one = partial + split * size
            with e.when(e.load(one, F32) > NOTHING):
                _merge(e, self.dim, out, state, one + 8, one)
        _divide(e, self.dim, out, state, out)
        e.ret()


def _merge(e: Emitter, dim: int, running: Value, state: Value, sums: Value, most: Value) -> None:
    """Add a split: ``state`` and ``most`` point to a maximum and a sum of weights."""
    old, new = e.load(state, F32), e.load(most, F32)
    top = e.max(old, new)
    keep, take = exp(e, old - top), exp(e, new - top)
    e.store(state, top)
    e.store(state, e.fma(e.load(most, F32, 4), take, e.load(state, F32, 4) * keep), 4)
    width = lanes(dim)
    for at in range(0, dim, width):
        held, added = (e.load(p, vec(F32, width), at * 4) for p in (running, sums))
        e.store(running, e.fma(added, take.spread(width), held * keep.spread(width)), at * 4)


def _divide(e: Emitter, dim: int, running: Value, state: Value, out: Value) -> None:
    width = lanes(dim)
    inverse = e.const(F32, 1.0) / e.load(state, F32, 4)
    for at in range(0, dim, width):
        e.store(out, e.load(running, vec(F32, width), at * 4) * inverse.spread(width), at * 4)
