"""Codes of 2 to 4 bits in bytes, and numbers rounded to bfloat16 and e4m3, as KV codecs store them."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit_kernels.cpu.emit import Emitter
from quantkit_kernels.cpu.values import F32, I8, I16, I32, Value, vec

LARGEST = 2.0**126
TINY, MOST = 2.0**-126, 3.3895313892515355e38
"""bfloat16's smallest normal and largest finite number."""


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
    codes, wide = [], vec(I32, 16)
    for at in range(0, dim, 16):
        start = at * bits // 8
        if bits == 4:  # eight codes in a word
            first, second = (e.load(where, I32, start + half).spread(8) for half in (0, 4))
            words = first.shuffle(range(16), second)
        elif bits == 2:
            words = e.load(where, I32, start).spread(16)
        else:
            words = e.load(where, I16, start).zext(I32).spread(16)
        codes.append(words.shr(e.const(wide, [bits * i % 32 for i in range(16)])) & 2**bits - 1)
    return codes


def within(e: Emitter, x: Value, limit: float) -> Value:
    """Clamped to ``[−most, most]``."""
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
