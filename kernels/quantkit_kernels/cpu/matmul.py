"""``y = x Wᵀ``: one loop for all formats; a decoder says how a format's weights are unpacked.

Weights of integers lie in blocks of ``lanes`` rows, a row a lane, in the order in which they are read; 32
values of a row are a subgroup. An output is a sum over subgroups (or halves of them, where 16 values share a
scale) in rising order, each an exact sum of integers (or one such sum over the whole row, where its
activations share a scale): the same bits for one row of activations or many, for any number of threads and
any instruction set. Floating-point weights lie row after row: :mod:`~quantkit_kernels.cpu.float_product`.

Rows are multiplied while weights are unpacked in registers. Where registers are few, or unpacking takes long,
a block is unpacked once for many rows, into this thread's scratch memory, and all of them are multiplied from
there, a tile of rows at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from llvmlite import ir

from quantkit_kernels.cpu import amx, decoders
from quantkit_kernels.cpu.amx import AmxProduct
from quantkit_kernels.cpu.driver import begin
from quantkit_kernels.cpu.float_product import FloatProduct
from quantkit_kernels.cpu.isa import Isa
from quantkit_kernels.cpu.product_spec import ARGUMENTS, ProductSpec
from quantkit_kernels.cpu.product_tile import TileWriter, Turns
from quantkit_kernels.cpu.values import Value
from quantkit_kernels.cpu.weight_decoder import STRIPE, SUB

FEW = 4
"""Rows of activations that are multiplied at once while weights are unpacked in registers, at most."""
MOST_COLUMNS = 1 << 17
"""The most columns of the family ``int8``: that many products of −128 and 127 just fit an int32."""


class Matmul(ProductSpec):
    """The kernel of a product."""

    arguments: ClassVar[Sequence[str]] = ARGUMENTS

    def emit(self, module: ir.Module, isa: Isa) -> None:
        if isa.amx and self.decoder == decoders.BF16:
            AmxProduct(module, isa, self).write()
        elif self.decoder.family.real:
            FloatProduct(module, isa, self).write()
        else:
            _Writer(module, isa, self).write()


def tile(isa: Isa) -> tuple[int, int]:
    """Blocks and rows of activations that are multiplied at once from scratch memory."""
    return 2, isa.lanes // 2


def unpacks_before(spec: ProductSpec, isa: Isa) -> bool:
    """Whether a block is unpacked into scratch memory before many rows are multiplied by it: where unpacking
    takes long, or registers are few."""
    return spec.decoder.blocks_per_unpack(isa) > 1 or isa.lanes < 16


def scratch_bytes(product: ProductSpec, isa: Isa, subgroups: int) -> int:
    """Scratch memory that a thread needs."""
    if product.decoder.family.real:
        return amx.SCRATCH_BYTES if isa.amx and product.decoder == decoders.BF16 else 0
    if not unpacks_before(product, isa):
        return 0
    blocks = max(tile(isa)[0], product.decoder.blocks_per_unpack(isa))
    return blocks * subgroups * SUB * isa.lanes * product.decoder.family.width


class _Writer:
    def __init__(self, module: ir.Module, isa: Isa, spec: ProductSpec) -> None:
        self.e, self.a, self.unit, thread = begin(module, spec.name, ARGUMENTS)
        self.isa = isa
        self.spec = spec
        self.decoder = spec.decoder
        a = self.a
        a.x, a.x_scales, a.x_sums = (p + thread * a.x_private for p in (a.x, a.x_scales, a.x_sums))
        a.scratch = a.scratch + thread * a.scratch_private
        self.tiles = TileWriter(self.e, a, isa, spec)

    def write(self) -> None:
        e, a = self.e, self.a
        together = self.tiles.blocks_per_unpack
        blocks, rows = tile(self.isa)
        unit = self.unit
        across = (a.stripes + a.stripes_a_unit - 1) // a.stripes_a_unit
        first = unit % across * a.stripes_a_unit
        per = STRIPE // self.isa.lanes
        begin, end = first * per, e.min(first + a.stripes_a_unit, a.stripes) * per
        top = unit // across * a.rows_a_unit
        bottom = e.min(top + a.rows_a_unit, a.rows)
        count = bottom - top
        limit = self.decoder.family.direct_rows if together <= FEW else 1
        if not unpacks_before(self.spec, self.isa):
            self._directly(begin, end, top, bottom)
        else:
            with e.either(count <= limit) as otherwise:
                self._directly(begin, end, top, bottom)
                otherwise()
                size = max(blocks, together)
                with e.loop(begin, end, size) as block:
                    self._unpack(block, size)
                    full = count // rows * rows + top
                    with e.loop(0, size, blocks) as first:
                        with e.loop(top, full, rows) as row:
                            self.tiles.multiply(block, row, blocks, rows, first)
                        with e.loop(full, bottom) as row:
                            self.tiles.multiply(block, row, blocks, 1, first)
        e.ret()

    def _directly(self, begin: Value, end: Value, top: Value, bottom: Value) -> None:
        """Multiply while weights are unpacked in registers."""
        e, together = self.e, self.tiles.blocks_per_unpack
        # a multiplication of 16 bits by a lane takes that from 16 of ARM's registers only
        few = FEW - (self.isa.neon and self.decoder.family.width == 2) if together <= FEW else 1
        blocks = together if unpacks_before(self.spec, self.isa) else 2
        for number in range(1, few):
            with e.when((bottom - top).equals(number)), e.loop(begin, end, together) as block:
                self.tiles.multiply(block, top, together, number)
        with e.when(bottom - top >= few), e.loop(begin, end, blocks) as block:
            times = (bottom - top) // few
            full = times * few + top
            distance = self.tiles.block_bytes * blocks
            with e.loop(0, times) as turn:
                row = top + turn * few
                self.tiles.multiply(block, row, blocks, few, turns=Turns.of(e, turn, times, distance))
            for count in range(1, few):
                with e.when((bottom - full).equals(count)):
                    self.tiles.multiply(block, full, blocks, count)

    def _unpack(self, block: Value, count: int) -> None:
        e = self.e
        with e.loop(0, self.a.subgroups) as s:
            for b in range(0, count, self.tiles.blocks_per_unpack):
                for i, values in enumerate(self.tiles.scratch_steps(self.tiles.packed(block + b, s))):
                    for j, value in enumerate(values):
                        e.store(self.tiles.scratch(b + j, s), value, i * self.isa.lanes * 4)
