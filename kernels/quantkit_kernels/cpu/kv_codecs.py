"""How a head's key or value lies in a page: encoded by one kernel, decoded to float32 by another.

The bits are those that the reference codecs make of a float32 vector (rotated ones': within what sums in
another order differ by). ``parts`` are pointers to what a slot holds, by name, ``shared`` to what its page
does; a vector of a head is a list of :func:`lanes`-wide values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from quantkit_kernels.cpu.emit import Emitter
from quantkit_kernels.cpu.values import F32, I8, I16, I32, Value, vec

LARGEST = 2.0**126
TINY, MOST = 2.0**-126, 3.3895313892515355e38
"""bfloat16's smallest normal and largest finite number."""


PAGE = 64
"""Slots in a page."""
GROUP = 32
"""Numbers that share a scale in 2 to 4 bits, slots that do of keys: what attention decodes at once."""
CURVES = {2: (0.892891, 0.0506915), 3: (0.471436, 0.0115850), 4: (0.240464, 0.00209768)}
"""Level c of rotated vectors' codes is ``u (a + b u²)``, u = c − (2^bits − 1) / 2."""
SMALLEST, FARTHEST = 2.0**-60, 2.0**60
Parts = Mapping[str, Value]
Sizes = Callable[[int], dict[str, int]]


@dataclass(frozen=True)
class PageCodec:
    """A codec of one side.

    Attributes:
        name: the codec's name in the cache.
        bytes: head dimension → bytes that a slot takes, by part.
        store: ``(e, parts, values)`` or, where a page shares something, ``(e, parts, values, common)``.
        load: ``(e, parts, head dimension, common)`` → values.
        shared: head dimension → bytes that a page takes beside its slots.
        common: ``(e, shared, group, head dimension)``: what all of a group's slots need, loaded once.
        gather: ``(e, shared, slots, head dimension)``: fills ``shared`` from float32 ``[PAGE, D]`` before
            its slots are stored.
        hadamard: vectors are rotated before.
    """

    name: str
    bytes: Sizes
    store: Callable[..., None]
    load: Callable[[Emitter, Parts, int, Sequence[Value]], list[Value]]
    shared: Sizes = lambda dim: {}
    common: Callable[[Emitter, Parts, Value, int], list[Value]] = lambda e, shared, group, dim: []
    gather: Callable[[Emitter, Parts, Value, int], None] | None = None
    hadamard: bool = False


def lanes(dim: int) -> int:
    """Width of the vectors that a head is cut into, whatever the instruction set: at most 16."""
    return next(width for width in (16, 8, 4, 2) if dim % width == 0)


def _plain(name: str) -> PageCodec:
    """The vector itself, in one of the dtypes that models compute in."""
    size = 4 if name == "f32" else 2

    def store(e: Emitter, parts: Parts, values: list[Value]) -> None:
        for i, value in enumerate(values):
            if name != "f32":
                value = e.narrowed(value) if name == "bf16" else e.half_narrowed(value)
            e.store(parts["values"], value, i * value.lanes * size)

    def load(e: Emitter, parts: Parts, dim: int, common: Sequence[Value]) -> list[Value]:
        width = lanes(dim)
        kind = vec(F32 if name == "f32" else I16, width)
        values = [e.load(parts["values"], kind, at * size) for at in range(0, dim, width)]
        if name == "f32":
            return values
        return [e.widened(value) if name == "bf16" else e.half_widened(value) for value in values]

    return PageCodec(name, lambda dim: {"values": size * dim}, store, load)


def _store_int8(e: Emitter, parts: Parts, values: list[Value]) -> None:
    scale = rounded_up(e, e.highest_abs(values) / 127.0)
    inverse = (e.const(F32, 1.0) / scale).spread(values[0].lanes)
    for i, value in enumerate(values):
        kind = value.type
        code = e.max(e.min(e.round(value * inverse), e.const(kind, 127.0)), e.const(kind, -127.0))
        e.store(parts["codes"], e.whole(code).trunc(vec(I8, value.lanes)), i * value.lanes)
    e.store(parts["scale"], scale.bits(I32).shr(16).trunc(I16))


def _load_int8(e: Emitter, parts: Parts, dim: int, common: Sequence[Value]) -> list[Value]:
    width = lanes(dim)
    scale = bf16(e, parts["scale"], 0).spread(width)
    return [e.load(parts["codes"], vec(I8, width), at).sext(vec(I32, width)).real() * scale
            for at in range(0, dim, width)]


def _store_fp8(e: Emitter, parts: Parts, values: list[Value]) -> None:
    values = [within(e, value, LARGEST) for value in values]
    scale = rounded_up(e, e.highest_abs(values) / 448.0)
    inverse = (e.const(F32, 1.0) / scale).spread(values[0].lanes)
    for i, value in enumerate(values):
        e.store(parts["codes"], e4m3(e, value * inverse), i * value.lanes)
    e.store(parts["scale"], scale.bits(I32).shr(16).trunc(I16))


def _load_fp8(e: Emitter, parts: Parts, dim: int, common: Sequence[Value]) -> list[Value]:
    """Where float32 has its sign, the low bits of its exponent and the high ones of its mantissa, e4m3's bits
    mean 2⁻¹²⁰ of what they are, denormal ones too."""
    width, result = lanes(dim), []
    scale = bf16(e, parts["scale"], 0).spread(width)
    for at in range(0, dim, width):
        wide = e.load(parts["codes"], vec(I8, width), at).sext(vec(I32, width))
        real = (((wide << 20) & 0x07F00000) | (wide & -0x80000000)).bits(vec(F32, width))
        result.append(real * 2.0**120 * scale)
    return result


def _by_token(bits: int) -> PageCodec:
    """``codes · scale + low``, a grid for 32 numbers of a token."""
    top = float(2**bits - 1)

    def store(e: Emitter, parts: Parts, values: list[Value]) -> None:
        width, kind = values[0].lanes, values[0].type
        values = [e.max(e.min(v, e.const(kind, LARGEST)), e.const(kind, -LARGEST)) for v in values]
        parts_of_groups = []
        for group in range(len(values) * width // GROUP):
            vectors = values[group * GROUP // width:(group + 1) * GROUP // width]
            highest, least = vectors[0], vectors[0]
            for value in vectors[1:]:
                highest, least = e.max(highest, value), e.min(least, value)
            low = -signed_up(e, e.highest(-least))
            scale = rounded_up(e, (e.highest(highest) - low) / top)
            inverse = (e.const(F32, 1.0) / scale).spread(width)
            parts_of_groups += [_nearest(e, (value - low.spread(width)) * inverse, top) for value in vectors]
            e.store(parts["scale"], scale.bits(I32).shr(16).trunc(I16), group * 2)
            e.store(parts["low"], low.bits(I32).shr(16).trunc(I16), group * 2)
        pack(e, parts["codes"], parts_of_groups, bits)

    def load(e: Emitter, parts: Parts, dim: int, common: Sequence[Value]) -> list[Value]:
        scales, lows = (e.widened(e.load(parts[name], vec(I16, dim // GROUP))) for name in ("scale", "low"))
        groups = [[i * 16 // GROUP] * 16 for i in range(dim // 16)]
        return [code.real() * scales.shuffle(group) + lows.shuffle(group)
                for code, group in zip(unpack(e, parts["codes"], dim, bits), groups)]

    return PageCodec(f"token{bits}", lambda dim: {"codes": dim * bits // 8, "scale": dim // GROUP * 2,
                                                  "low": dim // GROUP * 2}, store, load)


def _by_channel(bits: int) -> PageCodec:
    """``codes · scale + low``, a grid for 32 slots of a channel."""
    top = float(2**bits - 1)

    def gather(e: Emitter, shared: Parts, slots: Value, dim: int) -> None:
        kind = vec(F32, 16)
        with e.loop(0, PAGE // GROUP) as group, e.loop(0, dim, 16) as at:
            begin = slots + group * (GROUP * dim * 4) + at * 4
            least, highest = e.var(e.const(kind, LARGEST)), e.var(e.const(kind, -LARGEST))
            with e.loop(0, GROUP) as slot:
                value = e.load(begin + slot * (dim * 4), kind)
                value = e.max(e.min(value, e.const(kind, LARGEST)), e.const(kind, -LARGEST))
                least.set(e.min(least.get(), value))
                highest.set(e.max(highest.get(), value))
            low = -signed_up(e, -least.get())
            scale = rounded_up(e, (highest.get() - low) / top)
            for name, value in (("scale", scale), ("low", low)):
                e.store(shared[name] + (group * dim + at) * 2,
                        value.bits(vec(I32, 16)).shr(16).trunc(vec(I16, 16)))

    def common(e: Emitter, shared: Parts, group: Value, dim: int) -> list[Value]:
        return [e.widened(e.load(shared[name] + group * (dim * 2), vec(I16, 16), at * 2))
                for name in ("scale", "low") for at in range(0, dim, 16)]

    def store(e: Emitter, parts: Parts, values: list[Value], grid: Sequence[Value]) -> None:
        kind, rounded = values[0].type, []
        for i, value in enumerate(values):
            value = e.max(e.min(value, e.const(kind, LARGEST)), e.const(kind, -LARGEST))
            inverse = e.const(kind, 1.0) / grid[i]
            rounded.append(_nearest(e, (value - grid[len(values) + i]) * inverse, top))
        pack(e, parts["codes"], rounded, bits)

    def load(e: Emitter, parts: Parts, dim: int, grid: Sequence[Value]) -> list[Value]:
        return [code.real() * grid[i] + grid[dim // 16 + i]
                for i, code in enumerate(unpack(e, parts["codes"], dim, bits))]

    return PageCodec(f"channel{bits}", lambda dim: {"codes": dim * bits // 8}, store, load,
                     lambda dim: dict.fromkeys(("scale", "low"), PAGE // GROUP * dim * 2), common, gather)


def _hadamard(bits: int, centered: bool) -> PageCodec:
    """``level(code) · scale + mean``, the mean of 64 slots."""
    first, third = CURVES[bits]
    book = [u * (first + third * u * u) for u in (c - (2**bits - 1) / 2 for c in range(2**bits))]

    def level(e: Emitter, code: Value) -> Value:
        u = code.real() - (2**bits - 1) / 2
        return u * (u * u * third + first)

    def gather(e: Emitter, shared: Parts, slots: Value, dim: int) -> None:
        kind = vec(F32, 16)
        with e.loop(0, dim, 16) as at:
            total = e.var(e.const(kind, 0.0))
            with e.loop(0, PAGE) as slot:
                value = e.load(slots + slot * (dim * 4) + at * 4, kind)
                total.set(total.get() + within(e, value, FARTHEST))
            e.store(shared["mean"] + at * 2, e.narrowed(total.get() * (1 / PAGE)))

    def common(e: Emitter, shared: Parts, group: Value, dim: int) -> list[Value]:
        return [e.widened(e.load(shared["mean"], vec(I16, 16), at * 2)) for at in range(0, dim, 16)]

    def store(e: Emitter, parts: Parts, values: list[Value], mean: Sequence[Value] = ()) -> None:
        kind = values[0].type
        values = [within(e, v, FARTHEST) for v in values]
        values = [v - m for v, m in zip(values, mean)] if mean else values
        size = e.sqrt(_total(e, [(v, v) for v in values]) / float(16 * len(values)))
        inverse = (e.const(F32, 1.0) / e.max(size, e.const(F32, SMALLEST))).spread(16)
        codes = []
        for value in values:
            normal, code = value * inverse, e.const(vec(I32, 16), 0)
            for low, high in itertools.pairwise(book):
                above = normal > e.const(kind, (low + high) / 2)
                code = e.select(above, code + 1, code)
            codes.append(code)
        chosen = [level(e, code) for code in codes]
        scale = _total(e, list(zip(values, chosen))) / _total(e, [(c, c) for c in chosen])
        pack(e, parts["codes"], codes, bits)
        e.store(parts["scale"], e.narrowed(scale).trunc(I16))

    def load(e: Emitter, parts: Parts, dim: int, mean: Sequence[Value]) -> list[Value]:
        scale = bf16(e, parts["scale"], 0).spread(16)
        levels = [level(e, code) * scale for code in unpack(e, parts["codes"], dim, bits)]
        return [value + m for value, m in zip(levels, mean)] if mean else levels

    def sizes(dim: int) -> dict[str, int]:
        return {"codes": dim * bits // 8, "scale": 2}

    if not centered:
        return PageCodec(f"hadamard{bits}", sizes, store, load, hadamard=True)
    return PageCodec(f"hadamard{bits}c", sizes, store, load, lambda dim: {"mean": dim * 2}, common, gather,
                     True)


def _nearest(e: Emitter, steps: Value, top: float) -> Value:
    return e.whole(e.max(e.min(e.round(steps), e.const(steps.type, top)), e.const(steps.type, 0.0)))


def _total(e: Emitter, pairs: Sequence[tuple[Value, Value]]) -> Value:
    total = pairs[0][0] * pairs[0][1]
    for a, b in pairs[1:]:
        total = e.fma(a, b, total)
    return e.sum(total)


def pack(e: Emitter, where: Value, codes: Sequence[Value], bits: int) -> None:
    """Codes int32 ``[16]`` each, lowest bits first; those of 3 bits: all low pairs, then all high bits."""
    if bits == 3:
        pack(e, where, [code & 3 for code in codes], 2)
        pack(e, where + len(codes) * 4, [code.shr(2) for code in codes], 1)
        return
    each = 8 // bits
    for i, code in enumerate(codes):
        small = code.trunc(vec(I8, 16))
        byte = small.shuffle(range(0, 16, each))
        for place in range(1, each):
            byte = byte | small.shuffle(range(place, 16, each)) << place * bits
        e.store(where, byte, i * 2 * bits)


def unpack(e: Emitter, where: Value, dim: int, bits: int) -> list[Value]:
    """int32 ``[16]`` for every 16 of ``dim`` codes that :func:`pack` left."""
    if bits == 3:
        high = unpack(e, where + dim // 4, dim, 1)
        return [low | bit << 2 for low, bit in zip(unpack(e, where, dim, 2), high)]
    shifts = e.const(vec(I32, 16), [bits * i % 32 for i in range(16)])
    if bits == 1:
        words = [e.load(where, I16, at // 8).zext(I32).spread(16) for at in range(0, dim, 16)]
    else:  # eight or sixteen codes in a word
        each = 32 // bits
        loaded = e.load(where, vec(I32, dim // each))
        words = [loaded.shuffle([(at + i) // each for i in range(16)]) for at in range(0, dim, 16)]
    return [word.shr(shifts) & 2**bits - 1 for word in words]


def within(e: Emitter, x: Value, limit: float) -> Value:
    """Clamped to ``[−limit, limit]``."""
    return e.max(e.min(x, e.const(x.type, limit)), e.const(x.type, -limit))


def bf16(e: Emitter, pointer: Value, offset: int) -> Value:
    """One bfloat16 as float32."""
    return (e.load(pointer, I16, offset).zext(I32) << 16).bits(F32)


def rounded_up(e: Emitter, x: Value) -> Value:
    """The smallest normal bfloat16 that isn't below x ≥ 0, as float32."""
    integer, real = _kinds(x)
    up = ((x.bits(integer) + 0xFFFF) & -65536).bits(real)
    return e.max(e.min(up, e.const(real, MOST)), e.const(real, TINY))


def signed_up(e: Emitter, x: Value) -> Value:
    """The smallest bfloat16 that isn't below x, as float32."""
    integer, real = _kinds(x)
    near = e.narrowed(x).zext(integer) << 16
    rounded = near.bits(real)
    step = e.select(rounded > 0.0, near + 0x10000,
                    e.select(rounded < 0.0, near - 0x10000, e.const(integer, 0x10000)))
    return e.select(rounded < x, step.bits(real), rounded)


def e4m3(e: Emitter, x: Value) -> Value:
    """float32 → int8 lanes of e4m3 bits, half to even; at most 448."""
    integer, real = _kinds(x)
    size = e.min(e.abs(x), e.const(real, 448.0))
    # 2⁻⁶ and above: three bits of mantissa are kept, half to even; below, multiples of 2⁻⁹
    words = size.bits(integer)
    normal = (words + 0x7FFFF + (words.shr(20) & 1)).shr(20) - (120 << 3)
    tiny = e.whole(e.round(size * 512.0))
    code = e.select(size < 2.0**-6, tiny, normal)
    return (code | (x.bits(integer).shr(24) & 128)).trunc(vec(I8, x.lanes))


def _kinds(x: Value) -> tuple[object, object]:
    return (vec(I32, x.lanes), vec(F32, x.lanes)) if x.lanes > 1 else (I32, F32)


BF16, FP16, FP32 = map(_plain, ("bf16", "f16", "f32"))
ROTATED = replace(FP32, name="f32_hadamard", hadamard=True)
"""Rotated vectors that somebody else encodes and decodes."""
INT8 = PageCodec("int8", lambda dim: {"codes": dim, "scale": 2}, _store_int8, _load_int8)
FP8 = PageCodec("fp8", lambda dim: {"codes": dim, "scale": 2}, _store_fp8, _load_fp8)
CODECS = {codec.name: codec for codec in (
    BF16, FP16, FP32, ROTATED, INT8, FP8, *map(_by_token, (2, 3, 4)), *map(_by_channel, (2, 3, 4)),
    *(_hadamard(bits, centered) for bits in (2, 3, 4) for centered in (False, True)))}
PARTS = ("values", "codes", "scale", "low", "mean")
"""Names of parts, in the order of a record's pointers."""
