"""The scales of groups, and their minima: how they lie, and how they become float32.

They lie in the order in which blocks of rows are read: ``[blocks, groups, lanes]``, or ``[blocks, groups, 2,
lanes]`` with minima, which follow their scale. What is stored of a scale may be a small number that
multiplies another, float16 or float32, which many groups of a row share (a superblock). All of it is exact
but that product, which is rounded once, to float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from quantkit_kernels.cpu.emit import Emitter
from quantkit_kernels.cpu.values import F32, I8, I16, I32, Value, vec

Stored = Literal["bf16", "f16", "f32", "e8m0", "e4m3", "u8", "i8"]
"""``e8m0``: a byte b means 2 ^ (b − 127). ``e4m3``: OCP's, never negative. ``u8``, ``i8``: whole numbers."""
WIDTHS: dict[Stored, int] = {"bf16": 2, "f16": 2, "f32": 4, "e8m0": 1, "e4m3": 1, "u8": 1, "i8": 1}
"""Bytes of a number."""


@dataclass(frozen=True)
class ScaleLayout:
    """How scales are stored.

    Attributes:
        stored: each of them.
        minima: whether each is followed by a minimum, which is stored likewise.
        outer: columns that share what scales are multiples of (with minima, a second number that those are
            multiples of); 0: those of a row. ``None``: scales are what is stored.
        outer_stored: how these numbers are stored: ``[blocks, superblocks, lanes]``, or ``[…, 2, lanes]``.
        shared: whether the rows of a block share their scales, which are ``[blocks, groups]``.
    """

    stored: Stored = "f32"
    minima: bool = False
    outer: int | None = None
    outer_stored: Literal["f16", "f32"] = "f32"
    shared: bool = False

    @property
    def name(self) -> str:
        outer = "" if self.outer is None else f"_outer{self.outer or ''}_{self.outer_stored}"
        return self.stored + "_min" * self.minima + outer + "_shared" * self.shared


FLOAT32 = ScaleLayout()


class ScaleReader:
    """Emits the reading of scales.

    Args:
        e: writes the kernel.
        layout: how they are stored.
        lanes: rows of a block.
        scales, outer: where they lie.
        groups, superblocks: of a row, int64.
    """

    def __init__(self, e: Emitter, layout: ScaleLayout, lanes: int, scales: Value, outer: Value,
                 groups: Value, superblocks: Value) -> None:
        self.e, self.layout, self.lanes, self.scales, self.outer = e, layout, lanes, scales, outer
        self.groups, self.superblocks = groups, superblocks

    def multiplied(self, block: Value, superblock: Value) -> list[Value] | None:
        """What the scales of a superblock (and its minima) are multiples of, float32 ``[lanes]`` each."""
        if self.layout.outer is None:
            return None
        return self._numbers(self.outer, block * self.superblocks + superblock, self.layout.outer_stored)

    def read(self, block: Value, group: Value, multiplied: Sequence[Value] | None = None) -> list[Value]:
        """The scale of a group, and its minimum if there are any, float32 ``[lanes]`` each."""
        place = block * self.groups + group
        if self.layout.shared:
            return [self.e.load(self.scales + place * 4, F32).spread(self.lanes)]
        numbers = self._numbers(self.scales, place, self.layout.stored)
        if multiplied is None:
            return numbers
        return [number * outer for number, outer in zip(numbers, multiplied)]

    def _numbers(self, start: Value, place: Value, stored: Stored) -> list[Value]:
        count, size = 1 + self.layout.minima, self.lanes * WIDTHS[stored]
        return [widened(self.e, stored, start + (place * (count * size) + part * size), self.lanes)
                for part in range(count)]


def widened(e: Emitter, stored: Stored, where: Value, lanes: int) -> Value:
    """The numbers that lie there, float32 ``[lanes]``."""
    if stored == "f32":
        return e.load(where, vec(F32, lanes))
    if stored in ("bf16", "f16"):
        halves = e.load(where, vec(I16, lanes))
        return e.widened(halves) if stored == "bf16" else e.half_widened(halves)
    small, wide = e.load(where, vec(I8, lanes)), vec(I32, lanes)
    if stored == "i8":
        return small.sext(wide).real()
    words = small.zext(wide)
    if stored == "u8":
        return words.real()
    if stored == "e8m0":  # float32 has the same exponents, but for its smallest, which is a subnormal number
        return e.max(words << 23, e.const(wide, 1 << 22)).bits(vec(F32, lanes))
    return (words << 20).bits(vec(F32, lanes)) * 2.0**120
