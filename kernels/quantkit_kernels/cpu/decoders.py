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


def _narrow_integers(bits: int) -> Callable[..., Iterator[Sequence[Value]]]:
    """2 or 3 bits: four values of each lane's row a vector, as :func:`_w8a8` has them. The low two bits of
    four vectors share their bytes, the first lowest; behind them the third bits of all eight, likewise."""
    def unpack(e: Emitter, isa: Isa, source: Value) -> Iterator[Sequence[Value]]:
        words, size = vec(I16, 2 * isa.lanes), 4 * isa.lanes
        above = e.load(source, words, 2 * size) if bits == 3 else None
        for i in range(SUB // 4):
            if i % 4 == 0:
                low = e.load(source, words, i // 4 * size)
            codes = (low.shr(i % 4 * 2) if i % 4 else low) & 0x0303
            if above is not None:
                codes = codes | (above << 2 - i if i < 2 else above.shr(i - 2)) & 0x0404
            yield (codes.bits(vec(I8, size)),)

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


def learned_trellis(bits: int, levels: tuple[int, ...]) -> WeightDecoder:
    """Rings of 64 rows of symbols of 2 to 4 bits, of which the 8 bits that begin with a row's own mean one
    of 256 ``levels``, −127 to 127. The upper half of these is the lower half, negated.

    A column's ring is a little-endian stream of ``8 · bits`` bytes, the first row's symbol in its lowest
    bits.
    """
    size = 8 * bits  # bytes of a ring

    def unpack(e: Emitter, isa: Isa, source: Value) -> Iterator[Sequence[Value]]:
        table = tuple(level + isa.offset & 255 for level in levels[:128])
        wide, taken = vec(I8, 4 * isa.lanes), min(32, SUB * size)
        for step in range(SUB // 4):
            values: list[list[Value]] = []
            for column in range(4 * step, 4 * step + 4):
                # more than the ring is read, since 32 bytes are a vector, but nothing behind the subgroup
                start = min(column * size, SUB * size - taken)
                ring = e.load(source + start, vec(I8, taken))
                values.append([])
                for first in range(0, 64, 4 * isa.lanes):
                    places, starts = _windows(bits, isa.lanes, first)
                    windows = isa.bit_fields(
                        e, ring.shuffle([column * size - start + place % size for place in places]).bits(
                            vec(I32, isa.lanes)), starts)
                    level = isa.lookup_128(e, table, windows)
                    values[-1].append(e.select(windows < 0, e.const(wide, 0) - level, level))
            yield [block for four in zip(*values) for block in _side_by_side(four)]

    return WeightDecoder(f"trellis{bits}_learned_{_digest(levels)}", BYTES, SUB * bits // 8, unpack, 64,
                         signed=True)


def _windows(bits: int, lanes: int, first: int) -> tuple[list[int], list[int]]:
    """Where the windows of ``4 · lanes`` rows lie: the bytes of the ring that make up each word, which has
    those of four rows, and the bit of its word at which each begins. Words are in the order that
    :func:`_side_by_side` turns into that of rows."""
    rows = [first + lanes * block + 4 * run for run in range(lanes // 4) for block in range(4)]
    places = [bits * row // 8 + byte for row in rows for byte in range(4)]
    return places, [bits * row % 8 + bits * place for row in rows for place in range(4)]


def _side_by_side(columns: Sequence[Value]) -> list[Value]:
    """Four vectors of bytes, a column each → four vectors whose words have a byte of each column: the first
    has the first four bytes of every run of 16, the second the next four, and so on."""
    def woven(a: Value, b: Value, half: int, each: int) -> Value:
        """A half of each run of 16 bytes of ``a`` and ``b``, each ``each`` bytes of theirs by turns."""
        return a.shuffle([16 * run + 8 * half + at * each + byte + other * a.lanes
                          for run in range(a.lanes // 16) for at in range(8 // each)
                          for other in range(2) for byte in range(each)], b)

    a, b, c, d = columns
    return [woven(woven(a, b, half, 1), woven(c, d, half, 1), quarter, 2)
            for half in range(2) for quarter in range(2)]


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
INT2, UINT2, INT3, UINT3 = (
    WeightDecoder(f"{'u' * (not signed)}int{bits}", BYTES, SUB * bits // 8, _narrow_integers(bits),
                  zero_level=signed << (bits - 1))
    for bits in (2, 3) for signed in (1, 0))
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
