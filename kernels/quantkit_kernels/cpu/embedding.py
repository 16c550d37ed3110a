"""Rows of an embedding: from a plain table, or from the blocks that a product reads, in any format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar, Literal

from llvmlite import ir

from quantkit_kernels.cpu.driver import begin
from quantkit_kernels.cpu.emit import Emitter
from quantkit_kernels.cpu.isa import Isa
from quantkit_kernels.cpu.product_spec import ProductSpec
from quantkit_kernels.cpu.scales import ScaleReader
from quantkit_kernels.cpu.values import F32, I8, I16, I32, I64, Value, vec
from quantkit_kernels.cpu.weight_decoder import SUB, WeightDecoder

ARGUMENTS = ("*ids", "*table", "*scales", "*outer", "*zeros", "*out", "columns", "size", "padded",
             "out_stride")
"""``ids`` int64 ``[M]``; ``table`` bfloat16, float16 or float32, or blocks with their scales and zero points;
``columns``: of a row of blocks, padded to whole groups; ``size``: of a row; ``padded``: of a row of out, at
least ``columns`` and 0 from ``size`` on."""

Plain = Literal["bf16", "f16", "f32"]


@dataclass(frozen=True)
class Embed:
    """A unit is a token: its row as float32, times a number.

    Attributes:
        packed: the product that multiplies by the table too, which says how it is packed; ``None``: a plain
            table ``[vocab, size]``.
        scale: multiplies the row.
        plain: the dtype of a plain table.
    """

    packed: ProductSpec | None
    scale: float = 1.0
    plain: Plain = "bf16"
    arguments: ClassVar[Sequence[str]] = ARGUMENTS

    @property
    def name(self) -> str:
        times = "" if self.scale == 1.0 else f"_times_{self.scale!r}"
        table = f"table_{self.plain}" if self.packed is None else self.packed.name.removeprefix("matmul_")
        return f"embed_{table}{times}"

    def emit(self, module: ir.Module, isa: Isa) -> None:
        e, a, unit, _ = begin(module, self.name, ARGUMENTS)
        token, out = e.load(a.ids, I64, unit * 8), a.out + unit * a.out_stride
        if self.packed is None:
            width = 4 if self.plain == "f32" else 2
            row = a.table + token * a.size * width
            with e.loop(0, a.size) as k:
                e.store(out + k * 4, self._times(self._plain(e, row + k * width)))
        elif self.packed.decoder.family.real:
            self._read_row(e, isa, self.packed, a, token, out)
        else:
            self._decode(e, isa, self.packed, a, token, out)
        with e.loop(a.size, a.padded) as k:  # a later row must not find what an earlier one left
            e.store(out + k * 4, e.const(F32, 0.0))
        e.ret()

    def _read_row(self, e: Emitter, isa: Isa, packed: ProductSpec, a: SimpleNamespace, token: Value,
                  out: Value) -> None:
        """Floating-point weights lie row after row."""
        decoder, group, single = packed.decoder, packed.group or 0, e.const(I64, 1)
        scales = ScaleReader(e, packed.scales, 1, a.scales, a.outer,
                             a.columns // group if group else single, single)
        row = token // isa.lanes if packed.scales.shared else token
        source = a.table + token * (a.columns // SUB * decoder.bytes)
        with e.loop(0, a.columns, SUB) as k:
            first, second = decoder.unpack(e, source + k // SUB * decoder.bytes)
            halves = [first, second]
            if decoder.family.rounded:
                halves = [second.shuffle([place for i in range(start, start + SUB // 4)
                                          for place in (i, i + SUB // 2)], first)
                          for start in (0, SUB // 4)]
            for half, values in enumerate(halves):
                if packed.group is not None:
                    (scale,) = scales.read(row, k // group if group else e.const(I64, 0))
                    values = values * scale.lane(0).spread(values.lanes)
                e.store(out + k * 4, self._times(values), half * SUB * 2)

    def _decode(self, e: Emitter, isa: Isa, packed: ProductSpec, a: SimpleNamespace, token: Value,
                out: Value) -> None:
        """A subgroup of all rows of the block is unpacked, as for a product, and one row of it kept."""
        decoder, lanes = packed.decoder, isa.lanes
        assert decoder.blocks_per_unpack(isa) == 1, "rows of several blocks lie side by side"
        step, width = decoder.family.step, decoder.family.width
        block, lane = token // lanes, token % lanes
        group, outer = packed.group or 0, packed.scales.outer
        single = e.const(I64, 1)
        groups = a.columns // group if group else single
        scales = ScaleReader(e, packed.scales, lanes, a.scales, a.outer, groups,
                             a.columns // outer if outer else single)
        kind = decoder.family.vector(1)
        room, each = e.room(SUB * lanes * width), lanes * step * width
        lane_room = e.room(2 * lanes * 4)
        span = min(group or SUB, SUB)
        with e.loop(0, a.columns, SUB) as k:
            source = a.table + (block * a.columns * lanes + k * lanes) // SUB * decoder.bytes
            for i, (values,) in enumerate(decoder.unpack(e, isa, source)):
                e.store(room, values, i * each)
            for first in range(0, SUB, span):
                place = (k + first) // group if group else e.const(I64, 0)
                numbers: list[Value] = []
                if packed.group is not None:
                    above = scales.multiplied(block, (k + first) // outer if outer else e.const(I64, 0))
                    for n, number in enumerate(scales.read(block, place, above)):
                        e.store(lane_room, number, n * lanes * 4)
                        numbers.append(e.load(lane_room + lane * 4, F32, n * lanes * 4))
                zero = e.load(a.zeros, I8, (block * groups + place) * lanes + lane) if packed.zeros else None
                for i in range(first // step, (first + span) // step):
                    values = e.load(room + lane * (step * width), kind, i * each)
                    values = self._level(values, decoder, isa, zero)
                    for n, number in enumerate(numbers):
                        other = number.spread(step) if values.lanes > 1 else number
                        values = values * other if n == 0 else values + other
                    e.store(out + k * 4, self._times(values), i * step * 4)

    @staticmethod
    def _level(values: Value, decoder: WeightDecoder, isa: Isa, zero: Value | None) -> Value:
        """Unpacked integers → levels, float32. Those of the family ``bytes`` and their zero points are
        unsigned."""
        step = values.lanes
        unsigned = decoder.family.unsigned and (not decoder.signed or isa.offset > 0)
        wide = vec(I32, step)
        integers = values.zext(wide) if unsigned else values.sext(wide)
        if zero is not None:
            integers = integers - (zero.zext(I32) if unsigned else zero.sext(I32)).spread(step)
        elif decoder.zero(isa):
            integers = integers - decoder.zero(isa)
        return integers.real()

    def _plain(self, e: Emitter, where: Value) -> Value:
        if self.plain == "f32":
            return e.load(where, F32)
        bits = e.load(where, I16)
        if self.plain == "f16":
            return e.half_widened(bits.spread(1)).lane(0)
        return (bits.zext(I32) << 16).bits(F32)

    def _times(self, value: Value) -> Value:
        return value if self.scale == 1.0 else value * self.scale
