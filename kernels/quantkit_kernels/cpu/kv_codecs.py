"""How a head's key or value lies in a page: encoded by one kernel, decoded to float32 by another.

The bits are those that the reference codecs make of a float32 vector. ``parts`` are pointers to what a slot
holds, by name; a vector of a head is a list of :func:`lanes`-wide values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quantkit_kernels.cpu.emit import Emitter
from quantkit_kernels.cpu.values import F32, I8, I16, I32, Value, vec

PAGE = 64
"""Slots in a page."""
GROUP = 32
"""Numbers that share a scale in int4."""
TINY, MOST = 2.0**-126, 3.3895313892515355e38
"""bfloat16's smallest normal and largest finite number."""
LARGEST = 2.0**126
Parts = Mapping[str, Value]


@dataclass(frozen=True)
class KVCodec:
    """A codec.

    Attributes:
        name: as the cache knows it.
        bytes: head dimension → bytes that a slot takes, by part.
        store: ``(e, parts, values)``.
        load: ``(e, parts, head dimension)`` → values.
    """

    name: str
    bytes: Callable[[int], dict[str, int]]
    store: Callable[[Emitter, Parts, list[Value]], None]
    load: Callable[[Emitter, Parts, int], list[Value]]


def lanes(dim: int) -> int:
    """Width of the vectors that a head is cut into, whatever the instruction set: at most 16."""
    return next(width for width in (16, 8, 4, 2) if dim % width == 0)


def _store_bf16(e: Emitter, parts: Parts, values: list[Value]) -> None:
    for i, value in enumerate(values):
        e.store(parts["values"], e.narrowed(value), i * value.lanes * 2)


def _load_bf16(e: Emitter, parts: Parts, dim: int) -> list[Value]:
    width = lanes(dim)
    return [e.widened(e.load(parts["values"], vec(I16, width), at * 2)) for at in range(0, dim, width)]


def _store_int8(e: Emitter, parts: Parts, values: list[Value]) -> None:
    scale = _rounded_up(e, e.highest_abs(values) / 127.0)
    inverse = (e.const(F32, 1.0) / scale).spread(values[0].lanes)
    for i, value in enumerate(values):
        kind = value.type
        code = e.max(e.min(e.round(value * inverse), e.const(kind, 127.0)), e.const(kind, -127.0))
        e.store(parts["codes"], e.whole(code).trunc(vec(I8, value.lanes)), i * value.lanes)
    e.store(parts["scale"], scale.bits(I32).shr(16).trunc(I16))


def _load_int8(e: Emitter, parts: Parts, dim: int) -> list[Value]:
    width = lanes(dim)
    scale = _bf16(e, parts["scale"], 0).spread(width)
    return [e.load(parts["codes"], vec(I8, width), at).sext(vec(I32, width)).real() * scale
            for at in range(0, dim, width)]


def _store_int4(e: Emitter, parts: Parts, values: list[Value]) -> None:
    width = values[0].lanes
    kind = values[0].type
    values = [e.max(e.min(v, e.const(kind, LARGEST)), e.const(kind, -LARGEST)) for v in values]
    for group in range(len(values) * width // GROUP):
        own = values[group * GROUP // width:(group + 1) * GROUP // width]
        most, least = own[0], own[0]
        for value in own[1:]:
            most, least = e.max(most, value), e.min(least, value)
        low = -_signed_up(e, e.highest(-least))
        scale = _rounded_up(e, (e.highest(most) - low) / 15.0)
        inverse = (e.const(F32, 1.0) / scale).spread(width)
        for i, value in enumerate(own):
            step = (value - low.spread(width)) * inverse
            code = e.max(e.min(e.round(step), e.const(kind, 15.0)), e.const(kind, 0.0))
            small = e.whole(code).trunc(vec(I8, width))
            pair = small.shuffle(range(0, width, 2)) | small.shuffle(range(1, width, 2)) << 4
            e.store(parts["codes"], pair, (group * GROUP + i * width) // 2)
        e.store(parts["scale"], scale.bits(I32).shr(16).trunc(I16), group * 2)
        e.store(parts["low"], low.bits(I32).shr(16).trunc(I16), group * 2)


def _load_int4(e: Emitter, parts: Parts, dim: int) -> list[Value]:
    width, found = 16, []
    for at in range(0, dim, width):
        if at % GROUP == 0:
            scale, low = (_bf16(e, parts[name], at // GROUP * 2).spread(width) for name in ("scale", "low"))
        first, second = (e.load(parts["codes"], I32, (at + half) // 2).spread(8) for half in (0, 8))
        words = first.shuffle(range(16), second)  # eight codes in each
        code = words.shr(e.const(words.type, [4 * (i % 8) for i in range(16)])) & 15
        found.append(code.real() * scale + low)
    return found


def _bf16(e: Emitter, pointer: Value, offset: int) -> Value:
    return (e.load(pointer, I16, offset).zext(I32) << 16).bits(F32)


def _rounded_up(e: Emitter, x: Value) -> Value:
    """The smallest normal bfloat16 that isn't below x ≥ 0, as float32."""
    up = ((x.bits(I32) + 0xFFFF) & -65536).bits(F32)
    return e.max(e.min(up, e.const(F32, MOST)), e.const(F32, TINY))


def _signed_up(e: Emitter, x: Value) -> Value:
    """The smallest bfloat16 that isn't below x, as float32."""
    near = e.narrowed(x).zext(I32) << 16
    real = near.bits(F32)
    step = e.select(real > 0.0, near + 0x10000, e.select(real < 0.0, near - 0x10000, e.const(I32, 0x10000)))
    return e.select(real < x, step.bits(F32), real)


BF16 = KVCodec("bf16", lambda dim: {"values": 2 * dim}, _store_bf16, _load_bf16)
INT8 = KVCodec("int8", lambda dim: {"codes": dim, "scale": 2}, _store_int8, _load_int8)
INT4 = KVCodec("int4", lambda dim: {"codes": dim // 2, "scale": dim // GROUP * 2, "low": dim // GROUP * 2},
               _store_int4, _load_int4)
CODECS = {codec.name: codec for codec in (BF16, INT8, INT4)}
PARTS = ("values", "codes", "scale", "low")
"""Names of parts, in the order of a record's pointers."""
