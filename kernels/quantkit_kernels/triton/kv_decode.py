"""Decodes the codes of a page to operands of matrix products, for all layouts, chosen at compile time.

A word of 32 bits has 2J codes of a slot (with 3 bits: the low two bits of each; a second word has their high
bits). Masking it makes a pair of numbers in one instruction, one in each half, so decoding works on pairs:

- For **keys** a pair is dimensions f and f + J of a word. The sum of a product may run over dimensions in any
  order: :func:`key_dims` gives the order in which queries are loaded so that words need not be exchanged
  between threads (adjacent words that a thread reads are then the tensor core's columns).
- For **values** sums run over slots, so words of two neighboring slots are mixed first. The dimensions of the
  result are in another order, too, which :func:`natural` undoes at the end.

The scale or mean of a whole vector multiplies its score or its weight; a grid's scale and lowest number are
applied to the pairs. With ``ASM`` pairs stay in one register, in the queries' 16-bit dtype; the version
without it computes in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from quantkit_kernels.triton.fragment import halves, int8_pair

PAGE = 64


def _both(bits: int) -> tl.constexpr:
    """Return a 16-bit pattern repeated in both halves of an int32."""
    word = bits * 0x10001
    return tl.constexpr(word - (1 << 32) if word >> 31 else word)


# level c is u (a + b u²), u = c − (2^bits − 1) / 2: with the odd integer U = 2u it is b / 8 · U (U² + 4a / b)
ADDED = tl.constexpr((0.0, 0.0, 4 * 0.892891 / 0.0506915, 4 * 0.471436 / 0.0115850,
                      4 * 0.240464 / 0.00209768))
SIZE = tl.constexpr((0.0, 0.0, 0.0506915 / 8, 0.0115850 / 8, 0.00209768 / 8))
ADDED_BF16 = {2: 71.5, 3: 163.0, 4: 458.0}
"""In bfloat16 the sum and the product are rounded. These summands, with the sizes below, leave the least
error of all: 0.02, 0.11 and 0.13%. Rounding the levels themselves would leave 0.03, 0.02 and 0.16%."""
SIZE_BF16 = tl.constexpr((0.0, 0.0, 0.01398197 * 0.892891 / 2, 0.00613156 * 0.471436 / 2,
                          0.00218051 * 0.240464 / 2))


def _bits(value: float, dtype: torch.dtype) -> str:
    """Return a 16-bit number repeated in both halves of a word, as a hexadecimal constant."""
    half = int(torch.tensor(value, dtype=dtype).view(torch.int16).item()) & 0xFFFF
    return f"0x{half * 0x10001:08x}"


def _asm(kind: str, bits: int, dtype: torch.dtype) -> str:
    """Return PTX that decodes a pair of codes, ``$1``, to two numbers, ``$0``.

    One instruction does both ``and`` and ``or``; it makes an integer the last bits of the number ``base``.
    """
    name, base = ("bf16", 128) if dtype == torch.bfloat16 else ("f16", 1024)
    top = 2**bits - 1

    def number(value: float) -> str:
        return _bits(value, dtype)

    def offset(by: float) -> str:
        return f"""
        mov.b32 by, {number(by)};
        fma.rn.{name}x2 c, c, one, by;"""

    text = ""
    if kind == "fp8":
        place, missing = (0x07F007F0, 2.0**120) if dtype == torch.bfloat16 else (0x3F803F80, 2.0**8)
        shift = 4 if dtype == torch.bfloat16 else 1
        text = f"""
        shr.b32 c, $1, {shift};
        and.b32 c, c, 0x{place:08x};
        lop3.b32 c, $1, 0x80008000, c, 0xEA;
        mov.b32 by, {number(missing)};
        mov.b32 low, 0x80008000;
        fma.rn.{name}x2 $0, c, by, low;"""
    elif kind == "int8" and dtype == torch.bfloat16:
        # 128 plus the low seven bits, minus 128 or 256
        text = f"""
        lop3.b32 c, $1, 0x007f007f, base, 0xEA;
        lop3.b32 low, $1, 0x00800080, base, 0xEA;
        mov.b32 by, {number(-1)};
        fma.rn.bf16x2 $0, low, by, c;"""
    elif kind == "int8":
        text = f"""
        lop3.b32 c, $1, 0x00ff00ff, 0x64806480, 0x6A;
        mov.b32 by, {number(-1152)};
        fma.rn.f16x2 $0, c, one, by;"""
    elif kind == "hadamard":
        added = ADDED_BF16[bits] if dtype == torch.bfloat16 else ADDED.value[bits]
        text = f"""
        lop3.b32 c, $1, 0x{2 * top * 0x10001:08x}, base, 0xEA;{offset(-base - top)}
        mov.b32 by, {number(added)};
        fma.rn.{name}x2 by, c, c, by;
        mov.b32 low, 0x80008000;
        fma.rn.{name}x2 $0, c, by, low;"""
    else:  # $2 and $3 are the scale and the lowest number
        text = f"""
        lop3.b32 c, $1, 0x{top * 0x10001:08x}, base, 0xEA;{offset(-base)}
        fma.rn.{name}x2 $0, c, $2, $3;"""
        if dtype == torch.float16:  # the top of a grid may exceed the largest number a little
            text += f"""
        mov.b32 by, {number(65504)};
        min.f16x2 c, $0, by;
        mov.b32 by, {number(-65504)};
        max.f16x2 $0, c, by;"""
    return f"""{{
        .reg .b32 c, one, by, low, base;
        mov.b32 one, {number(1)};
        mov.b32 base, {number(base)};{text}
        }}"""


ASM_TEXTS = {(kind, bits, half): _asm(kind, bits, torch.float16 if half else torch.bfloat16)
             for kind, widths in (("int8", (8,)), ("fp8", (8,)), ("hadamard", (2, 3, 4)), ("grid", (2, 3, 4)))
             for bits in widths for half in (False, True)}


@triton.constexpr_function
def asm_of(kind: str, bits: int, dtype: Any) -> str:
    """See :func:`_asm`."""
    return ASM_TEXTS[kind, bits, dtype.is_fp16()]


@triton.constexpr_function
def fields(bits: int) -> int:
    """Return J, the number of pairs in a word."""
    return 2 if bits == 8 else 4 if bits == 4 else 8


@triton.constexpr_function
def words(bits: int, dims: int) -> int:
    """Return the number of words for ``dims`` dimensions."""
    return dims // (4 if bits == 8 else 8 if bits == 4 else 16)


@triton.constexpr_function
def lift(kind: str, dtype: Any) -> float:
    """Return a factor for attention weights, because in float16 their products with small scales would
    vanish.

    The largest scale of float16 numbers is 516 for int8, 147 for fp8, and 415 for levels.
    """
    return 64.0 if dtype.is_fp16() and kind in ("int8", "fp8", "hadamard") else 1.0


@triton.constexpr_function
def level_size(bits: int, dtype: Any, asm: bool) -> float:
    """Return the number by which :func:`numbers` divides levels."""
    return SIZE_BF16.value[bits] if asm and not dtype.is_fp16() else SIZE.value[bits]


@triton.jit
def mix(a: tl.tensor, b: tl.tensor, ASM: tl.constexpr) -> tl.tensor:
    """Return a word of the low halves of two words and one of their high halves; a's half is the lower
    one."""
    if ASM:
        low = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [a, b], dtype=tl.int32,
                                        is_pure=True, pack=1)
        high = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [a, b], dtype=tl.int32,
                                         is_pure=True, pack=1)
    else:
        low, high = (a & 0xFFFF) | (b << 16), ((a >> 16) & 0xFFFF) | (b & -65536)
    return low, high


@triton.jit
def bf16_halves(w: tl.tensor) -> tl.tensor:
    """Split a word of two bfloat16 numbers; both are returned in float32."""
    return (w << 16).to(tl.float32, bitcast=True), (w & -65536).to(tl.float32, bitcast=True)


@triton.jit
def scales(ptr: tl.tensor, page: tl.tensor) -> tl.tensor:
    """Load the 64 bfloat16 scales of a page, two per word, as float32."""
    low, high = bf16_halves(tl.load(ptr + page * 32 + tl.arange(0, 32)))
    return tl.join(low, high).reshape(64)


@triton.jit
def _field(x: tl.tensor, y: tl.tensor, F: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """Extract pair F of a word, with other bits beside it.

    The codes are in the lowest bits of both halves, one bit higher for hadamard, and in the highest for fp8.
    """
    if BITS == 8:
        out = (x << 8 if F == 0 else x) if KIND == "fp8" else (x if F == 0 else x >> 8)
    else:
        UP: tl.constexpr = 1 if KIND == "hadamard" else 0
        WIDTH: tl.constexpr = 2 if BITS == 3 else BITS
        RIGHT: tl.constexpr = WIDTH * F - UP
        out = x >> RIGHT if RIGHT >= 0 else x << -RIGHT
        if BITS == 3:
            TOP: tl.constexpr = F - 2 - UP
            out = (out & (0x00030003 << UP)) | ((y >> TOP if TOP >= 0 else y << -TOP) & (0x00040004 << UP))
    return out


@triton.jit
def pairs_of(x: tl.tensor, y: tl.tensor, KIND: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """Extract all pairs of words ``[A, B]`` as ``[A, B, J]``; y has the high bits of 3-bit codes."""
    f0, f1 = _field(x, y, 0, KIND, BITS), _field(x, y, 1, KIND, BITS)
    if BITS == 8:
        out = tl.join(f0, f1)
    else:
        f2, f3 = _field(x, y, 2, KIND, BITS), _field(x, y, 3, KIND, BITS)
        if BITS == 4:
            out = tl.join(tl.join(f0, f2), tl.join(f1, f3))
        else:
            f4, f5 = _field(x, y, 4, KIND, BITS), _field(x, y, 5, KIND, BITS)
            f6, f7 = _field(x, y, 6, KIND, BITS), _field(x, y, 7, KIND, BITS)
            even, odd = tl.join(tl.join(f0, f4), tl.join(f2, f6)), tl.join(tl.join(f1, f5), tl.join(f3, f7))
            out = tl.join(even, odd)
    return out.reshape(x.shape[0], x.shape[1], fields(BITS))


@triton.jit
def numbers(x: tl.tensor, KIND: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr,
            ASM: tl.constexpr) -> tl.tensor:
    """Decode pairs of codes with one scale per vector to both numbers, without the scale.

    Levels are divided by :func:`level_size`.
    """
    if ASM:
        a, b = halves(tl.inline_asm_elementwise(asm_of(KIND, BITS, D), "=r,r", [x], dtype=tl.int32,
                                                is_pure=True, pack=1), D)
    elif KIND == "int8":
        a, b = int8_pair(x, 0x64006400 if D.is_fp16() else 0x43004300, D)
    elif KIND == "fp8":
        # float16 has room for the bits of e4m3, also of denormal numbers; only a power of two is missing
        a, b = halves((x & -2147450880) | ((x >> 1) & 0x3F803F80), tl.float16)
        a, b = (a.to(tl.float32) * 256.0).to(D), (b.to(tl.float32) * 256.0).to(D)
    else:
        TOP: tl.constexpr = 2**BITS - 1
        a = ((x & (2 * TOP)) - TOP).to(tl.float32)
        b = (((x >> 16) & (2 * TOP)) - TOP).to(tl.float32)
        a, b = (a * (a * a + ADDED[BITS])).to(D), (b * (b * b + ADDED[BITS])).to(D)
    return a, b


@triton.jit
def on_grid(x: tl.tensor, scale: tl.tensor, low: tl.tensor, BITS: tl.constexpr, D: tl.constexpr,
            ASM: tl.constexpr) -> tl.tensor:
    """Decode pairs of codes to ``code · scale + low``; scale and low are pairs of bfloat16."""
    if ASM:
        if D.is_fp16():
            scale, low = _in_half(scale), _in_half(low)
        a, b = halves(tl.inline_asm_elementwise(asm_of("grid", BITS, D), "=r,r,r,r", [x, scale, low],
                                                dtype=tl.int32, is_pure=True, pack=1), D)
    else:
        TOP: tl.constexpr = 2**BITS - 1
        a, b = bf16_halves(scale)
        c, d = bf16_halves(low)
        a = (x & TOP).to(tl.float32) * a + c
        b = ((x >> 16) & TOP).to(tl.float32) * b + d
        if D.is_fp16():
            a, b = tl.clamp(a, -65504.0, 65504.0), tl.clamp(b, -65504.0, 65504.0)
        a, b = a.to(D), b.to(D)
    return a, b


@triton.jit
def _in_half(w: tl.tensor) -> tl.tensor:
    """Convert a word of two bfloat16 numbers to a word of two float16 numbers."""
    low, high = bf16_halves(w)
    low = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    return (low & 0xFFFF) | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)
