"""The formats of weights: how a subgroup of 32 values of each lane's row lies, and how it is unpacked.

:mod:`~quantkit_kernels.cpu.pack` brings weights into these orders.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from quantkit_kernels.cpu.emit import Emitter
from quantkit_kernels.cpu.isa import Isa
from quantkit_kernels.cpu.matmul import SUB, Decoder
from quantkit_kernels.cpu.values import F32, I8, I16, I32, Value, vec

NF4_LEVELS = 8191
"""NF4's table is rounded to whole multiples of 1/8191: nearer than bfloat16 would be."""


def _int4(e: Emitter, isa: Isa, source: Value) -> Iterator[Value]:
    """Byte j of a lane's run of four: value j of eight in its low half, j + 4 in its high half."""
    wide = vec(I8, 4 * isa.lanes)
    for i in range(SUB // 8):
        pair = e.load(source, wide, i * 4 * isa.lanes)
        yield pair & 15
        yield pair.bits(vec(I16, 2 * isa.lanes)).shr(4).bits(wide) & 15


def _int8(e: Emitter, isa: Isa, source: Value) -> Iterator[Value]:
    """Two neighbours of each lane's row side by side."""
    wide = vec(I8, 2 * isa.lanes)
    for i in range(SUB // 2):
        yield e.load(source, wide, i * 2 * isa.lanes).sext(vec(I16, 2 * isa.lanes))


def _bf16(e: Emitter, isa: Isa, source: Value) -> Iterator[Value]:
    """Two neighbours of each lane's row side by side: one is a lane's high half, one is shifted there."""
    real = vec(F32, isa.lanes)
    for i in range(SUB // 2):
        pair = e.load(source, vec(I32, isa.lanes), i * 4 * isa.lanes)
        yield (pair << 16).bits(real)
        yield (pair & -65536).bits(real)


def _w8a8(e: Emitter, isa: Isa, source: Value) -> Iterator[Value]:
    """Four neighbours of each lane's row side by side."""
    for i in range(SUB // 4):
        yield e.load(source, vec(I8, 4 * isa.lanes), i * 4 * isa.lanes)


def _e4m3(e: Emitter, isa: Isa, source: Value) -> Iterator[Value]:
    """Four neighbours of each lane's row side by side. Where float32 has its sign, the low bits of its
    exponent and the high ones of its mantissa, e4m3's bits mean 2⁻¹²⁰ of what they are, denormal ones too."""
    real = vec(F32, isa.lanes)
    for i in range(SUB // 4):
        four = e.load(source, vec(I32, isa.lanes), i * 4 * isa.lanes)
        for place in range(4):
            bits = ((four << (24 - 8 * place)) >> 4) & -0x78100000
            yield bits.bits(real) * 2.0**120


def nf4(table: tuple[float, ...]) -> Decoder:
    """4-bit codes into a table of 16 numbers in [−1, 1].

    A run of 16 bytes is a 128-bit quarter or half of a vector: value 2 i and 2 i + 1 of a lane lie where
    interleaving the table's low and high bytes leaves them.
    """
    words = [round(value * NF4_LEVELS) & 0xFFFF for value in table]
    low, high = (tuple(word >> shift & 255 for word in words) for shift in (0, 8))

    def unpack(e: Emitter, isa: Isa, source: Value) -> Iterator[Value]:
        wide = vec(I8, 4 * isa.lanes)
        count = 4 * isa.lanes
        halves = [[at + 16 * run for run in range(count // 16) for at in part]
                  for part in (range(8), range(8, 16))]
        for i in range(SUB // 8):
            pair = e.load(source, wide, i * count)
            for codes in (pair & 15, pair.bits(vec(I16, 2 * isa.lanes)).shr(4).bits(wide) & 15):
                least, most = isa.lookup(e, low, codes), isa.lookup(e, high, codes)
                for half in halves:
                    order = [place for at in half for place in (at, at + count)]
                    yield least.shuffle(order, most).bits(vec(I16, 2 * isa.lanes))

    digest = hashlib.sha256(repr(words).encode()).hexdigest()[:8]  # a name says all that the code depends on
    return Decoder(f"nf4_{digest}", "words", SUB // 2, unpack)


INT4 = Decoder("int4", "bytes", SUB // 2, _int4)
INT8 = Decoder("int8", "words", SUB, _int8)
W8A8 = Decoder("w8a8", "int8", SUB, _w8a8)
E4M3 = Decoder("e4m3", "floats", SUB, _e4m3)
E4M3_TOKENS = Decoder("e4m3_tokens", "e4m3", SUB, _e4m3)
BF16 = Decoder("bf16", "floats", 2 * SUB, _bf16)
