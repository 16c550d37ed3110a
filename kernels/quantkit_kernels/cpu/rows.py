"""What happens to a row of activations between two multiplications: norm, a gate, quantization.

A row operation takes a row from somewhere (``plain``, ``norm``, or through a gate: ``silu``, ``gelu``,
``clamped``) and leaves it as a multiplication wants it: float32, bfloat16, int16 or int8 with a scale for
each subgroup of 32, or int8 or e4m3 with one scale for the row; rotated before
(:mod:`~quantkit_kernels.cpu.hadamard`) if the weights are. A unit is a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from llvmlite import ir

from quantkit_kernels.cpu import hadamard
from quantkit_kernels.cpu.driver import begin
from quantkit_kernels.cpu.emit import Emitter, exp
from quantkit_kernels.cpu.isa import Isa
from quantkit_kernels.cpu.values import F32, I8, I32, I64, Value, vec
from quantkit_kernels.cpu.weight_decoder import SUB, Family

LANES = 16
"""Of this module's vectors, whatever the instruction set's are: sums then have one order everywhere."""
SMALLEST = 2.0**-100
"""A subgroup's, or row's, largest value is taken to be at least this: its inverse stays finite."""
ARGUMENTS = ("*x", "*second", "*weight", "*picked", "*out", "*scales", "*sums", "x_stride", "size",
             "subgroups", "out_stride", "out_private", "eps", "*signs", "*mix", "*room", "room_private",
             "limit")
"""Of a record. ``picked``: int64, which rows of x; null: all. ``out_stride``: bytes between rows of codes, of
scales and of sums; behind a row's sums are those of the halves of its subgroups; ``out_private``: between
threads. ``eps``, ``limit``: the bits of a float32. ``signs``, ``mix`` and ``room`` are those of the rotation;
``room_private``: between threads."""
ADD_ARGUMENTS = ("*x", "*weight", "*out", "x_stride", "out_stride", "size", "eps")
"""Of a record of :class:`NormAdd`; what pads x and weight is 0."""
GELU, GELU_CUBE = 1.5957691216057308, 0.044715
"""2 · √(2 / π) and the cube's factor: GELU by tanh is ``x / (1 + exp(-GELU · (x + GELU_CUBE · x³)))``."""
CLAMPED_GAIN = 1.702
"""The sigmoid's gain in a clamped gate."""
Source = Literal["plain", "norm", "silu", "gelu", "clamped"]


@dataclass(frozen=True)
class RowKernel:
    """A row operation.

    Attributes:
        source: ``plain`` takes ``x``; ``norm`` is ``x / sqrt(mean(x²) + eps) · weight``,
            https://arxiv.org/abs/1910.07467; ``silu`` is ``silu(x) · second``,
            https://arxiv.org/abs/2002.05202; ``gelu`` is ``gelu(x) · second`` with GELU's approximation by
            tanh, https://arxiv.org/abs/1606.08415; ``clamped`` is gpt-oss's, https://arxiv.org/abs/2508.10925:
            ``g · sigmoid(1.702 g) · (u + 1)`` with x and second cut off at ``limit``, second at −limit too.
        family: how the row is left.
        rotation: the rotation's width, which is the row's; 0 stands for none.
    """

    source: Source
    family: Family
    rotation: int = 0
    arguments: ClassVar[Sequence[str]] = ARGUMENTS

    @property
    def name(self) -> str:
        return f"rows_{self.source}_{self.family}{f'_rotated{self.rotation}' if self.rotation else ''}"

    def emit(self, module: ir.Module, isa: Isa) -> None:
        e, a, unit, thread = begin(module, self.name, ARGUMENTS)
        row = e.var(unit)
        with e.when(e.present(a.picked)):
            row.set(e.load(a.picked, I64, unit * 8))
        x, second = a.x + row.get() * a.x_stride, a.second + row.get() * a.x_stride
        factor = _norm_factor(e, x, a.size, a.eps) if self.source == "norm" else None
        shift = unit * a.out_stride + thread * a.out_private
        out, scales, sums = (p + shift for p in (a.out, a.scales, a.sums))
        wide = vec(F32, LANES)
        limit = a.limit.trunc(I32).bits(F32).spread(LANES) if self.source == "clamped" else None

        def value(at: Value) -> Value:
            result = e.load(x, wide, at)
            if factor is not None:
                result = result * factor.spread(LANES) * e.load(a.weight, wide, at)
            if self.source == "silu":
                result = result / (exp(e, -result) + 1.0) * e.load(second, wide, at)
            if self.source == "gelu":
                inner = (result * result * GELU_CUBE + 1.0) * result * GELU
                result = result / (exp(e, -inner) + 1.0) * e.load(second, wide, at)
            if limit is not None:  # NaN passes these minima and maxima, whose second argument it is
                result = e.min(limit, result)
                other = e.min(limit, e.max(-limit, e.load(second, wide, at)))
                result = result / (exp(e, result * -CLAMPED_GAIN) + 1.0) * (other + 1.0)
            return result

        if self.rotation:
            room = a.room + thread * a.room_private
            with e.loop(0, self.rotation, LANES) as i:
                e.store(room, value(i * 4) * e.load(a.signs, wide, i * 4), i * 4)
            turned = hadamard.emit(e, room, a.mix, self.rotation)
            with e.loop(self.rotation, a.subgroups * SUB, LANES) as i:
                e.store(turned, e.const(wide, 0.0), i * 4)

        def values(s: Value) -> list[Value]:
            """The subgroup ``s``."""
            places = [s * (SUB * 4) + half * LANES * 4 for half in range(SUB // LANES)]
            return [e.load(turned, wide, at) if self.rotation else value(at) for at in places]

        if self.family.by_token:
            _leave_row(e, self.family, values, a.subgroups, out, scales, sums)
        else:
            with e.loop(0, a.subgroups) as s:
                _leave(e, self.family, values(s), a.subgroups, out, scales, sums, s)
        e.ret()


@dataclass(frozen=True)
class NormAdd:
    """``out + x / sqrt(mean(x²) + eps) · weight`` in place of out; a unit is a row."""

    name = "norm_add"
    arguments: ClassVar[Sequence[str]] = ADD_ARGUMENTS

    def emit(self, module: ir.Module, isa: Isa) -> None:
        e, a, unit, _ = begin(module, self.name, ADD_ARGUMENTS)
        x, out = a.x + unit * a.x_stride, a.out + unit * a.out_stride
        factor, wide = _norm_factor(e, x, a.size, a.eps).spread(LANES), vec(F32, LANES)
        with e.loop(0, a.size, LANES) as i:
            value = e.load(x, wide, i * 4) * factor * e.load(a.weight, wide, i * 4)
            e.store(out, e.load(out, wide, i * 4) + value, i * 4)
        e.ret()


def _norm_factor(e: Emitter, x: Value, size: Value, eps: Value) -> Value:
    """``1 / sqrt(mean(x²) + eps)``; what pads a row is 0."""
    wide = vec(F32, LANES)
    total = e.var(e.const(wide, 0.0))
    with e.loop(0, size, LANES) as i:
        value = e.load(x, wide, i * 4)
        total.set(e.fma(value, value, total.get()))
    mean = e.sum(total.get()) / size.real()
    return e.const(F32, 1.0) / e.sqrt(mean + eps.trunc(I32).bits(F32))


def _leave_row(e: Emitter, family: Family, values: Callable[[Value], list[Value]], subgroups: Value,
               out: Value, scales: Value, sums: Value) -> None:
    """Store a row that shares one scale. Its values are worked out twice: first for the largest."""
    zero = e.const(vec(F32, LANES), 0.0)
    largest, wrong, total = e.var(zero), e.var(zero), e.var(e.const(vec(I32, LANES), 0))
    with e.loop(0, subgroups) as s:
        for value in values(s):
            largest.set(e.max(largest.get(), e.abs(value)))
            wrong.set(wrong.get() + value * 0.0)
    scale = e.max(e.highest(largest.get()), e.const(F32, SMALLEST)) / float(family.levels)
    with e.loop(0, subgroups) as s:
        for half, value in enumerate(values(s)):
            exact = value / scale.spread(LANES)
            if family.real:
                e.store(out + s * (SUB * 4), _e4m3(e, exact), half * LANES * 4)
                continue
            code = e.whole(e.round(exact))
            total.set(total.get() + code)
            e.store(out + s * SUB, code.trunc(vec(I8, LANES)), half * LANES)
    e.store(scales, scale + e.sum(wrong.get()))  # NaN and infinity end up here, as below
    if family.sums_rows:
        e.store(sums, e.sum(total.get()))


def _e4m3(e: Emitter, value: Value) -> Value:
    """The nearest number of e4m3, for values that don't overflow it: adding 1.5 · 2^(exponent + 20) leaves a
    float32 four bits, or what lies on the grid of the smallest, whose exponent is −6."""
    exponent = e.max(value.bits(vec(I32, LANES)) & 0x7F800000, e.const(vec(I32, LANES), 121 << 23))
    large = (exponent + (20 << 23)).bits(vec(F32, LANES)) * 1.5
    return value + large - large


def _as_real(e: Emitter, family: Family, values: list[Value]) -> list[Value]:
    """The two halves of a subgroup as a floating-point family wants them."""
    if family.rounded:
        values = [e.narrowed(value) for value in values]
        if family.width == 2:
            return values
        first, second = (e.widened(value) for value in values)
        return [first.shuffle(range(odd, 2 * LANES, 2), second) for odd in (1, 0)]
    return values


def _leave(e: Emitter, family: Family, values: list[Value], subgroups: Value, out: Value, scales: Value,
           sums: Value, index: Value) -> None:
    """Store the subgroup ``index`` of a row."""
    if family.real:
        for half, value in enumerate(_as_real(e, family, values)):
            e.store(out + index * (SUB * family.width), value, half * LANES * family.width)
        return
    levels, width = family.levels, family.width
    largest = e.max(e.abs(values[0]), e.abs(values[1]))
    top = e.max(e.highest(largest), e.const(F32, SMALLEST))
    inverse = (e.const(F32, float(levels)) / top).spread(LANES)
    halves, total = sums + subgroups * 4, e.const(I32, 0)
    for half, value in enumerate(values):
        code = e.whole(e.round(value * inverse))
        e.store(out + index * (SUB * width), code.trunc(vec(family.element(), LANES)),
                half * LANES * width)
        part = e.sum(code)
        e.store(halves, part, index * 8 + half * 4)
        total = total + part
    # NaN and infinity become 0 as a code, and so must be in the scale: a broken model says so
    wrong = e.sum(values[0] * 0.0 + values[1] * 0.0)
    e.store(scales, top / float(levels) + wrong, index * 4)
    e.store(sums, total, index * 4)
