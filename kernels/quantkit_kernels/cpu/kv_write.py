"""What is written to the cache: rotated keys, values, and codes of what has waited long enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

from llvmlite import ir

from quantkit_kernels.cpu import hadamard
from quantkit_kernels.cpu.driver import begin
from quantkit_kernels.cpu.emit import Emitter
from quantkit_kernels.cpu.isa import Isa
from quantkit_kernels.cpu.kv_codecs import GROUP, PAGE, lanes, within
from quantkit_kernels.cpu.kv_pages import CACHE, HeadPages, PageCodecs, SequenceRecord
from quantkit_kernels.cpu.values import F32, I32, I64, Value, vec

ROPE_ARGUMENTS = (*CACHE, "*q", "*k", "*v", "*cos", "*sin", "*q_norm", "*k_norm", "*signs", "*mix",
                  "q_stride", "kv_stride", "group", "eps")
"""``cos`` and ``sin``: float32 ``[positions, D / 2]``; norms: float32 ``[D]`` or null; ``signs`` and ``mix``:
of the rotation, if a codec wants it; ``eps``: a float32's bits."""
ENCODE_ARGUMENTS = (*CACHE, "*scratch", "blocks", "scratch_private")
"""``blocks``: pages of a head that may be done, at most."""
KEEP_ARGUMENTS = ("*rows", "*sequences", "*q", "q_stride", "layer", "query_heads")
UNDO_HADAMARD_ARGUMENTS = ("*x", "*signs", "*mix", "x_stride", "heads")
FARTHEST = 2.0**100
"""What is farther from 0 is taken for that where vectors are rotated: their sums are finite."""


def encode_bytes(dim: int) -> int:
    """Scratch memory that a thread needs to encode a page."""
    return 4 * PAGE * dim


@dataclass(frozen=True)
class RopeStore:
    """Normalize and rotate a row's queries in place, and its key; encode and store key and value.

    A unit is a key head of a row. Queries are also divided by √D. Where vectors wait, they are stored as
    they were computed. https://arxiv.org/abs/2104.09864
    """

    codecs: PageCodecs
    dim: int
    arguments: ClassVar[Sequence[str]] = ROPE_ARGUMENTS

    @property
    def name(self) -> str:
        return f"rope_store_{self.codecs.name}_d{self.dim}"

    def emit(self, module: ir.Module, isa: Isa) -> None:
        e, a, unit, _ = begin(module, self.name, ROPE_ARGUMENTS)
        row, head = unit // a.heads, unit % a.heads
        sequence, place, position = (e.load(a.rows, I64, row * 24 + 8 * i) for i in range(3))
        half = self.dim // 2
        angle = [e.load(p, vec(F32, half), position * (half * 4)) for p in (a.cos, a.sin)]
        eps = a.eps.trunc(I32).bits(F32)
        turned = {side: self.codecs.side(side).hadamard for side in "kv"}
        room = e.room(hadamard.room_bytes(self.dim)) if any(turned.values()) else None
        with e.loop(0, a.group) as number:
            q = a.q + row * a.q_stride + (head * a.group + number) * (self.dim * 4)
            self._turn(e, q, angle, a.q_norm, eps, self.dim**-0.5)
            if turned["k"]:
                _mixed(e, a, q, room, self.dim)
        k, v = (p + row * a.kv_stride + head * (self.dim * 4) for p in (a.k, a.v))
        self._turn(e, k, angle, a.k_norm, eps, None)
        pages = HeadPages(e, a, self.codecs, self.dim, sequence, head)
        at, residual = pages.length + place, self.codecs.residual
        slot = pages.residual(at) if residual else pages.slot(at)
        width = lanes(self.dim)
        for side, source in (("k", k), ("v", v)):
            if turned[side]:
                _mixed(e, a, source, room, self.dim, FARTHEST)
            values = [e.load(source, vec(F32, width), at * 4) for at in range(0, self.dim, width)]
            if residual:
                self.codecs.vectors.store(e, pages.vector(side, slot), values)
            else:
                self.codecs.side(side).store(e, pages.parts(side, slot), values)
        places = a.residual_positions if residual else a.positions
        with e.when(e.present(places)):
            e.store(places, position.trunc(I32), slot * 4)
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
class EncodePages:
    """Encode pages of vectors that have waited long enough; a unit is a page of a head of a sequence."""

    codecs: PageCodecs
    dim: int
    arguments: ClassVar[Sequence[str]] = ENCODE_ARGUMENTS

    @property
    def name(self) -> str:
        return f"encode_pages_{self.codecs.name}_d{self.dim}"

    def emit(self, module: ir.Module, isa: Isa) -> None:
        e, a, unit, thread = begin(module, self.name, ENCODE_ARGUMENTS)
        block, pair = unit % a.blocks, unit // a.blocks
        pages = HeadPages(e, a, self.codecs, self.dim, pair // a.heads, pair % a.heads)
        at = pages.start + block * PAGE
        scratch, width = a.scratch + thread * a.scratch_private, lanes(self.dim)
        with e.when(at < pages.border(pages.length + pages.count)):
            source, target = pages.residual(at), pages.slot(at)
            for side in "kv":
                codec = self.codecs.side(side)
                with e.loop(0, PAGE) as slot:
                    for i, value in enumerate(self.codecs.vectors.load(
                            e, pages.vector(side, source + slot), self.dim, [])):
                        e.store(scratch + slot * (self.dim * 4), value, i * width * 4)
                shared = pages.shared(side, target)
                if codec.gather is not None:
                    codec.gather(e, shared, scratch, self.dim)
                with e.loop(0, PAGE // GROUP) as group:
                    common = codec.common(e, shared, group, self.dim)
                    with e.loop(group * GROUP, group * GROUP + GROUP) as slot:
                        values = [e.load(scratch + slot * (self.dim * 4), vec(F32, width), i * 4)
                                  for i in range(0, self.dim, width)]
                        parts = pages.parts(side, target + slot)
                        codec.store(e, parts, values, *([common] if common else []))
            with e.when(e.present(a.positions)), e.loop(0, PAGE) as slot:
                place = e.load(a.residual_positions, I32, (source + slot) * 4)
                e.store(a.positions, place, (target + slot) * 4)
        e.ret()


@dataclass(frozen=True)
class KeepQueries:
    """Copy a row's queries to where its sequence keeps the last ones, if it does; a unit is a row."""

    dim: int
    arguments: ClassVar[Sequence[str]] = KEEP_ARGUMENTS

    @property
    def name(self) -> str:
        return f"keep_queries_d{self.dim}"

    def emit(self, module: ir.Module, isa: Isa) -> None:
        e, a, unit, _ = begin(module, self.name, KEEP_ARGUMENTS)
        sequence, place, position = (e.load(a.rows, I64, unit * 24 + 8 * i) for i in range(3))
        record = SequenceRecord(e, a, sequence)
        ring, size = record.address("queries"), record.number("query_window")
        # a later row of the step would write to the same place
        with e.when(e.present(ring)), e.when(place + size >= record.number("count")):
            row = self.dim * 4
            target = ring + (a.layer * size + position % size) * (a.query_heads * row)
            source, width = a.q + unit * a.q_stride, lanes(self.dim)
            with e.loop(0, a.query_heads * row, width * 4) as at:
                e.store(target + at, e.load(source + at, vec(F32, width)))
        e.ret()


@dataclass(frozen=True)
class UndoHadamard:
    """Rotate the heads of a row back, in place; a unit is a row."""

    dim: int
    arguments: ClassVar[Sequence[str]] = UNDO_HADAMARD_ARGUMENTS

    @property
    def name(self) -> str:
        return f"undo_hadamard_d{self.dim}"

    def emit(self, module: ir.Module, isa: Isa) -> None:
        e, a, unit, _ = begin(module, self.name, UNDO_HADAMARD_ARGUMENTS)
        room = e.room(hadamard.room_bytes(self.dim))
        with e.loop(0, a.heads) as head:
            _mixed(e, a, a.x + unit * a.x_stride + head * (self.dim * 4), room, self.dim, back=True)
        e.ret()


def _mixed(e: Emitter, a: SimpleNamespace, x: Value, room: Value | None, dim: int,
           farthest: float | None = None, back: bool = False) -> None:
    """Rotate the float32 vector at ``x``, clamped if asked, or rotate it back, in place."""
    assert room is not None
    wide = vec(F32, hadamard.LANES)

    def signed(value: Value, at: Value, wanted: bool) -> Value:
        return value * e.load(a.signs + at * 4, wide) if wanted else value

    with e.loop(0, dim, hadamard.LANES) as at:
        value = e.load(x + at * 4, wide)
        value = value if farthest is None else within(e, value, farthest)
        e.store(room + at * 4, signed(value, at, not back))
    rotated = hadamard.emit(e, room, a.mix, dim)
    with e.loop(0, dim, hadamard.LANES) as at:
        e.store(x + at * 4, signed(e.load(rotated + at * 4, wide), at, back))
