"""Mixtures of experts: which experts a row gets, products by each one's weight, and their weighted sum.

A row and one of its experts are a pair. Pairs lie in the order of their experts, so that those of an expert
are rows of one product, and are cut into tiles of one expert each. A tile is multiplied by the kernel that
multiplies all other rows by such a weight: an output's bits are the same whatever else is in its tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from llvmlite import ir

from quantkit_kernels.cpu import product_spec
from quantkit_kernels.cpu.driver import begin
from quantkit_kernels.cpu.emit import exp
from quantkit_kernels.cpu.isa import Isa
from quantkit_kernels.cpu.matmul import Matmul
from quantkit_kernels.cpu.product_spec import MOST_ROWS
from quantkit_kernels.cpu.values import F32, I64, PTR, vec

LANES = 16
LOWEST = -3e38
"""Below every score that is finite."""
PARTS = ("weights", "scales", "outer", "zeros", "bias")
"""Of a weight, as a row of a table of experts has them: addresses, int64; 0: there is none."""
TILE_BYTES = 24
"""A tile is three int64: its expert, its first pair, and how many pairs it has."""
ROUTE_ARGUMENTS = ("*scores", "*numbers", "*shares", "scores_stride", "experts", "chosen", "normalized")
"""``scores``: float32, overwritten; ``numbers``: int64 ``[rows, chosen]``, which experts; ``shares``: float32
likewise; ``normalized``: whether a row's shares sum to 1."""
ORDER_ARGUMENTS = ("*numbers", "*rows", "*places", "*tiles", "*count", "*next", "experts", "chosen", "pairs")
"""``rows``: int64, the row of each pair in the order of experts; ``places``: int64 ``[rows, chosen]``, where
each pair is in that order; ``count``: the number of tiles; ``next``: int64 ``[experts]``, room."""
PRODUCT_ARGUMENTS = (*product_spec.ARGUMENTS, "*tiles", "*table")
"""Those of a product, of which :data:`PARTS` come from the table; rows are pairs."""
SUM_ARGUMENTS = ("*x", "*places", "*shares", "*residual", "*out", "x_stride", "out_stride", "chosen", "size")
"""``residual``: what the sum is added to, with the strides of out; null: nothing."""
SHARED_ARGUMENTS = ("*x", "*scores", "*out", "x_stride", "scores_stride", "out_stride", "size")


@dataclass(frozen=True)
class Route:
    """The experts of a row: those with the largest shares of a softmax, of equals the first; a unit is a
    row. https://arxiv.org/abs/2101.03961"""

    name = "route"
    arguments: ClassVar[Sequence[str]] = ROUTE_ARGUMENTS

    def emit(self, module: ir.Module, isa: Isa) -> None:
        e, a, unit, _ = begin(module, self.name, ROUTE_ARGUMENTS)
        scores, first = a.scores + unit * a.scores_stride, unit * a.chosen
        numbers, shares = a.numbers + first * 8, a.shares + first * 4
        top, total, wrong, chosen = (e.var(e.const(F32, value)) for value in (LOWEST, 0.0, 0.0, 0.0))
        with e.loop(0, a.experts) as i:
            score = e.load(scores, F32, i * 4)
            top.set(e.max(top.get(), score))
            wrong.set(wrong.get() + score * 0.0)  # NaN and infinity must show, though some expert is chosen
        with e.loop(0, a.experts) as i:
            share = exp(e, e.load(scores, F32, i * 4) - top.get())
            total.set(total.get() + share)
            e.store(scores, share, i * 4)
        with e.loop(0, a.chosen) as choice:
            best, at = e.var(e.const(F32, -1.0)), e.var(e.const(I64, 0))
            with e.loop(0, a.experts) as i:
                share = e.load(scores, F32, i * 4)
                larger = share > best.get()
                best.set(e.select(larger, share, best.get()))
                at.set(e.select(larger, i, at.get()))
            chosen.set(chosen.get() + best.get())
            e.store(numbers, at.get(), choice * 8)
            e.store(shares, best.get(), choice * 4)
            e.store(scores, e.const(F32, -1.0), at.get() * 4)
        over = e.select(a.normalized.differs(0), chosen.get(), total.get())
        with e.loop(0, a.chosen) as choice:
            e.store(shares, e.load(shares, F32, choice * 4) / over + wrong.get(), choice * 4)
        e.ret()


@dataclass(frozen=True)
class OrderPairs:
    """Pairs in the order of their experts, and the tiles of it; one unit."""

    name = "order_pairs"
    arguments: ClassVar[Sequence[str]] = ORDER_ARGUMENTS

    def emit(self, module: ir.Module, isa: Isa) -> None:
        e, a, _, _ = begin(module, self.name, ORDER_ARGUMENTS)
        with e.loop(0, a.experts) as number:
            e.store(a.next, e.const(I64, 0), number * 8)
        with e.loop(0, a.pairs) as pair:
            counted = a.next + e.load(a.numbers, I64, pair * 8) * 8
            e.store(counted, e.load(counted, I64) + 1)
        start, tiles = e.var(e.const(I64, 0)), e.var(e.const(I64, 0))
        with e.loop(0, a.experts) as number:
            count = e.load(a.next, I64, number * 8)
            e.store(a.next, start.get(), number * 8)
            with e.loop(0, count, MOST_ROWS) as first:
                for i, value in enumerate((number, start.get() + first,
                                           e.min(count - first, e.const(I64, MOST_ROWS)))):
                    e.store(a.tiles + tiles.get() * TILE_BYTES, value, 8 * i)
                tiles.set(tiles.get() + 1)
            start.set(start.get() + count)
        e.store(a.count, tiles.get())
        with e.loop(0, a.pairs) as pair:
            after = a.next + e.load(a.numbers, I64, pair * 8) * 8
            place = e.load(after, I64)
            e.store(after, place + 1)
            e.store(a.rows, pair // a.chosen, place * 8)
            e.store(a.places, place, pair * 8)
        e.ret()


@dataclass(frozen=True)
class ExpertProduct:
    """Products of the pairs of each tile by its expert's weight; a unit is a part of a tile's outputs.

    Attributes:
        product: the kernel that multiplies by such a weight.
    """

    product: Matmul
    arguments: ClassVar[Sequence[str]] = PRODUCT_ARGUMENTS

    @property
    def name(self) -> str:
        return f"experts_{self.product.name}"

    def emit(self, module: ir.Module, isa: Isa) -> None:
        self.product.emit(module, isa)
        e, a, unit, thread = begin(module, self.name, PRODUCT_ARGUMENTS)
        parts = (a.stripes + a.stripes_a_unit - 1) // a.stripes_a_unit
        tile = a.tiles + unit // parts * TILE_BYTES
        number, first, count = (e.load(tile, I64, 8 * i) for i in range(3))
        expert = a.table + number * (8 * len(PARTS))
        values = vars(a) | {part: e.load(expert, PTR, 8 * i) for i, part in enumerate(PARTS)}
        values |= {name: values[name] + first * a.x_stride for name in ("x", "x_scales", "x_sums")}
        values |= {"out": a.out + first * a.out_stride, "rows": count, "rows_a_unit": count}
        record = e.room(8 * len(product_spec.ARGUMENTS))
        for i, argument in enumerate(product_spec.ARGUMENTS):
            e.store(record, values[argument.lstrip("*")], 8 * i)
        e.intrinsic(self.product.name, ir.VoidType(), record, unit % parts, thread)
        e.ret()


@dataclass(frozen=True)
class SumExperts:
    """What a row's experts gave, by their shares, added in the order in which they were chosen; a unit is a
    row."""

    name = "sum_experts"
    arguments: ClassVar[Sequence[str]] = SUM_ARGUMENTS

    def emit(self, module: ir.Module, isa: Isa) -> None:
        e, a, unit, _ = begin(module, self.name, SUM_ARGUMENTS)
        first, shift, wide = unit * a.chosen, unit * a.out_stride, vec(F32, LANES)
        places, shares = a.places + first * 8, a.shares + first * 4
        with e.loop(0, a.size, LANES) as i:
            total = e.var(e.const(wide, 0.0))
            with e.loop(0, a.chosen) as choice:
                result = a.x + e.load(places, I64, choice * 8) * a.x_stride
                share = e.load(shares, F32, choice * 4).spread(LANES)
                total.set(e.fma(share, e.load(result, wide, i * 4), total.get()))
            with e.when(e.present(a.residual)):
                total.set(e.load(a.residual + shift, wide, i * 4) + total.get())
            e.store(a.out + shift, total.get(), i * 4)
        e.ret()


@dataclass(frozen=True)
class AddShared:
    """What the expert of every row gave, times the sigmoid of the row's score, added to out; a unit is a
    row."""

    name = "add_shared"
    arguments: ClassVar[Sequence[str]] = SHARED_ARGUMENTS

    def emit(self, module: ir.Module, isa: Isa) -> None:
        e, a, unit, _ = begin(module, self.name, SHARED_ARGUMENTS)
        x, out, wide = a.x + unit * a.x_stride, a.out + unit * a.out_stride, vec(F32, LANES)
        score = e.load(a.scores + unit * a.scores_stride, F32)
        size = e.max(score, e.const(F32, 0.0) - score)
        small = exp(e, e.const(F32, 0.0) - size)  # of the larger side, so that nothing overflows
        share = e.select(score < e.const(F32, 0.0), small, e.const(F32, 1.0)) / (small + 1.0)
        share = share + score * 0.0  # NaN and infinity must show
        with e.loop(0, a.size, LANES) as i:
            value = e.fma(share.spread(LANES), e.load(x, wide, i * 4), e.load(out, wide, i * 4))
            e.store(out, value, i * 4)
        e.ret()
