"""The formats of weights: how a subgroup of 32 values of each lane's row lies, and how it is unpacked.

Weights of floating-point families lie row after row: a subgroup is 32 neighbors, as they are in a file.
:mod:`~quantkit_kernels.cpu.pack` brings weights into these orders.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence

from quantkit_kernels.cpu import weight_decoder
from quantkit_kernels.cpu.emit import Emitter
from quantkit_kernels.cpu.isa import Isa
from quantkit_kernels.cpu.values import F32, I8, I16, I32, Value, vec
from quantkit_kernels.cpu.weight_decoder import (
    BYTES,
    FLOATS,
    ROUNDED,
    SUB,
    WORDS,
    WeightDecoder,
)

NF4_LEVELS = 8191
"""NF4's table is rounded to whole multiples of 1/8191: nearer than bfloat16 would be."""


def _int4(e: Emitter, isa: Isa, source: Value) -> Iterator[Sequence[Value]]:
    """Byte j of a lane's run of four: value j of eight in its low half, j + 4 in its high half."""
    wide = vec(I8, 4 * isa.lanes)
    for i in range(SUB // 8):
        pair = e.load(source, wide, i * 4 * isa.lanes)
        yield (pair & 15,)
        yield (pair.bits(vec(I16, 2 * isa.lanes)).shr(4).bits(wide) & 15,)


def _int8(e: Emitter, isa: Isa, source: Value) -> Iterator[Sequence[Value]]:
    """Two neighbors of each lane's row side by side."""
    wide = vec(I8, 2 * isa.lanes)
    for i in range(SUB // 2):
        yield (e.load(source, wide, i * 2 * isa.lanes).sext(vec(I16, 2 * isa.lanes)),)


def _int8_planes(e: Emitter, isa: Isa, high: Value, low: Value) -> Iterator[Sequence[Value]]:
    """The high halves of all values lie as :func:`_int4` has them, the low halves likewise."""
    wide, words = vec(I8, 4 * isa.lanes), vec(I16, 2 * isa.lanes)
    for i in range(SUB // 8):
        upper, lower = (e.load(plane, wide, i * 4 * isa.lanes) for plane in (high, low))
        for codes in ((upper.bits(words) << 4).bits(wide) & -16 | lower & 15,
                      upper & -16 | lower.bits(words).shr(4).bits(wide) & 15):
            # values 0 and 1 in a lane's low bytes, 2 and 3 in its high ones
            pairs = (codes ^ -128).shuffle([4 * lane + at for lane in range(isa.lanes)
                                            for at in (0, 2, 1, 3)]).bits(words)
            yield (pairs << 8 >> 8,)
            yield (pairs >> 8,)


def _wide_integers(bits: int) -> Callable[..., Iterator[Sequence[Value]]]:
    """5 or 6 bits: low halves as :func:`_int4` has them, but of each four values the second and third lie the
    other way round, so that bytes of a 16-bit word are two apart; behind them the high bits, those of 8 or 4
    such vectors in a byte, the first lowest."""
    each = bits - 4

    def unpack(e: Emitter, isa: Isa, source: Value) -> Iterator[Sequence[Value]]:
        words, size = vec(I16, 2 * isa.lanes), 4 * isa.lanes
        shared = 8 // each  # vectors that share bytes of high bits
        for i in range(SUB // 4):
            place = i % shared
            if place == 0:
                above = e.load(source, words, SUB // 2 * isa.lanes + i // shared * size)
            if i % 2 == 0:
                pair = e.load(source, words, i // 2 * size)
            low = (pair if i % 2 == 0 else pair.shr(4)) & 0x0F0F
            shift = 4 - place * each
            high = above << shift if shift > 0 else above.shr(-shift) if shift < 0 else above
            codes = low | high & (0x1010 if bits == 5 else 0x3030)
            yield (codes & 255,)
            yield (codes.shr(8),)

    return unpack


def _bf16(e: Emitter, source: Value) -> Iterator[Value]:
    """One of a pair is a 32-bit word's high half, the other is shifted there."""
    pairs, real = e.load(source, vec(I32, SUB // 2)), vec(F32, SUB // 2)
    yield (pairs & -65536).bits(real)
    yield (pairs << 16).bits(real)


def _f16(e: Emitter, source: Value) -> Iterator[Value]:
    for half in range(2):
        yield e.half_widened(e.load(source, vec(I16, SUB // 2), half * SUB))


def _f32(e: Emitter, source: Value) -> Iterator[Value]:
    for half in range(2):
        yield e.load(source, vec(F32, SUB // 2), half * 2 * SUB)


def _w8a8(e: Emitter, isa: Isa, source: Value) -> Iterator[Sequence[Value]]:
    """Four neighbors of each lane's row side by side."""
    for i in range(SUB // 4):
        yield (e.load(source, vec(I8, 4 * isa.lanes), i * 4 * isa.lanes),)


def _e4m3(e: Emitter, source: Value) -> Iterator[Value]:
    """Where float32 has its sign, the low bits of its exponent and the high ones of its mantissa, e4m3's bits
    mean 2⁻¹²⁰ of what they are, denormal ones too."""
    words, real = vec(I32, SUB // 2), vec(F32, SUB // 2)
    for half in range(2):
        codes = e.load(source, vec(I8, SUB // 2), half * SUB // 2).sext(words)
        yield ((codes << 20) & -0x78100000).bits(real) * 2.0**120


def nf4(table: tuple[float, ...]) -> WeightDecoder:
    """4-bit codes into a table of 16 numbers in [−1, 1].

    A run of 16 bytes is a 128-bit quarter or half of a vector: value 2 i and 2 i + 1 of a lane lie where
    interleaving the table's low and high bytes leaves them.
    """
    words = [round(value * NF4_LEVELS) & 0xFFFF for value in table]
    low, high = (tuple(word >> shift & 255 for word in words) for shift in (0, 8))

    def unpack(e: Emitter, isa: Isa, source: Value) -> Iterator[Sequence[Value]]:
        wide = vec(I8, 4 * isa.lanes)
        count = 4 * isa.lanes
        halves = [[at + 16 * run for run in range(count // 16) for at in part]
                  for part in (range(8), range(8, 16))]
        for i in range(SUB // 8):
            pair = e.load(source, wide, i * count)
            for codes in (pair & 15, pair.bits(vec(I16, 2 * isa.lanes)).shr(4).bits(wide) & 15):
                least, high_bytes = isa.lookup(e, low, codes), isa.lookup(e, high, codes)
                for half in halves:
                    order = [place for at in half for place in (at, at + count)]
                    yield (least.shuffle(order, high_bytes).bits(vec(I16, 2 * isa.lanes)),)

    return WeightDecoder(f"nf4_{_digest(words)}", WORDS, SUB // 2, unpack)


def int_table(levels: tuple[int, ...]) -> WeightDecoder:
    """4-bit codes, as :func:`_int4` has them, into a table of 16 integers from −127 to 127.

    Where they span at most 24 they are looked up as unsigned numbers above the least.
    """
    low = min(levels)
    narrow = max(levels) - low <= 24

    def unpack(e: Emitter, isa: Isa, source: Value) -> Iterator[Sequence[Value]]:
        shift = -low if narrow else isa.offset
        table = tuple(level + shift & 255 for level in levels)
        for (codes,) in _int4(e, isa, source):
            yield (isa.lookup(e, table, codes),)

    return WeightDecoder(f"table4_{_digest(levels)}", BYTES, SUB // 2, unpack,
                         zero_level=-low if narrow else 0, fits_int16=narrow, signed=not narrow)


def _digest(table: Sequence[int]) -> str:
    """A part of a decoder's name, which says all that the code depends on."""
    return hashlib.sha256(repr(list(table)).encode()).hexdigest()[:8]


def trellis(bits: int, window: int, code: tuple[int, int, int]) -> WeightDecoder:
    """Rings of 64 rows of symbols of 2 to 4 bits, of which the last ``window`` bits mean a number.

    A word is four symbols of a ring, the first highest; vectors hold the 16 words of two columns each,
    neighbors in k side by side. The number is the sum of the nibbles of
    ``state · low ^ (state · high >> 16)``, less ``middle``, for a ``code`` of these three.
    """
    low, high, middle = code
    words = vec(I16, 32)

    def unpack(e: Emitter, isa: Isa, source: Value) -> Iterator[Sequence[Value]]:
        for pair in range(SUB // 2):
            lane_words = _ring_words(e, source + pair * 16 * bits, bits)
            before = _turned(lane_words, 1)
            if bits < 4:
                before = before | _turned(lane_words, 2) << 4 * bits
            levels: list[Value] = []
            for step in range(4):
                state = lane_words.shr((3 - step) * bits)
                if (step + 1) * bits < 16:
                    state = state | before << (step + 1) * bits
                if window < 16:
                    state = state & 2**window - 1
                product = state.zext(vec(I32, 32)) * high
                mixed = state * low ^ product.shr(16).trunc(words)
                nibbles = (mixed & 0x0F0F) + (mixed.shr(4) & 0x0F0F)
                value = (nibbles * 0x0101).shr(8) - middle
                levels += [value.shuffle(range(at, at + 2 * isa.lanes)) for at in range(0, 32, 2 * isa.lanes)]
            yield levels

    return WeightDecoder(f"trellis{bits}_{window}_{low}_{high}_{middle}", WORDS, SUB * bits // 8, unpack,
                         64)


def _ring_words(e: Emitter, source: Value, bits: int) -> Value:
    """int16 ``[32]``, of ``4 · bits`` bits: those of 3 bits have their low bytes first, then high nibbles."""
    words = vec(I16, 32)
    if bits == 4:
        return e.load(source, words)
    least = e.load(source, vec(I8, 32)).zext(words)
    if bits == 2:
        return least
    high_bits = e.load(source, vec(I8, 16), 32)
    return least | (high_bits & 15).shuffle(range(32), high_bits.shr(4)).zext(words) << 8


def _turned(words: Value, places: int) -> Value:
    """The words that lie ``places`` before these, around the ring."""
    return words.shuffle([(i - 2 * places) % 32 for i in range(32)])


INT4 = WeightDecoder("int4", BYTES, SUB // 2, _int4, zero_level=8)
UINT4 = WeightDecoder("uint4", BYTES, SUB // 2, _int4)
INT8 = WeightDecoder("int8", WORDS, SUB, _int8)
UINT8 = WeightDecoder("uint8", WORDS, SUB, _int8, zero_level=-128)
"""Unsigned codes, which lie as int8 of which −128 means 0."""
INT5, UINT5, INT6, UINT6 = (
    WeightDecoder(f"{'u' * (not signed)}int{bits}", WORDS, SUB * bits // 8, _wide_integers(bits),
                  zero_level=signed << (bits - 1))
    for bits in (5, 6) for signed in (1, 0))
INT8_PLANES = WeightDecoder("int8_planes", WORDS, SUB // 2, _int8_planes, planes=2)
W8A8 = WeightDecoder("w8a8", weight_decoder.INT8, SUB, _w8a8)
E4M3 = WeightDecoder("e4m3", FLOATS, SUB, _e4m3)
E4M3_TOKENS = WeightDecoder("e4m3_tokens", weight_decoder.E4M3, SUB, _e4m3)
BF16 = WeightDecoder("bf16", weight_decoder.BF16, 2 * SUB, _bf16)
BF16_ROUNDED = WeightDecoder("bf16_rounded", ROUNDED, 2 * SUB, _bf16)
"""Of bfloat16, by activations that are rounded to it."""
FP16 = WeightDecoder("f16", FLOATS, 2 * SUB, _f16)
FP32 = WeightDecoder("f32", FLOATS, 4 * SUB, _f32)


def bf16(isa: Isa) -> WeightDecoder:
    """The decoder of bfloat16 by activations rounded to it, with what instructions there are."""
    return BF16 if isa.bf16 else BF16_ROUNDED
