"""4-bit NormalFloat weights in blocks of 64, 16-bit activations: ``y = x Wᵀ``, ``w = table[q] · absmax``.

QLoRA, https://arxiv.org/abs/2305.14314. The sixteen levels are rounded to x's dtype; a block's absolute
maximum, float32, multiplies the float32 sum of a block.

On NVIDIA GPUs four codes at a time are looked up by ``prmt``, which picks bytes out of two registers: the
levels' low and high bytes lie in four registers each, half of them for codes up to 7. Codes are stored in
another order, in which both halves can be joined without masks. The twin in plain Triton selects by masks,
two codes at a time; it serves other GPUs and the interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quantkit_kernels.triton.fragment import (
    MAGIC,
    ROWS,
    family_of,
    lane_columns,
    nibbles,
    pairs,
    place,
    rows,
    shuffle,
    tile,
)
from quantkit_kernels.triton.packed import TritonDecoder, TritonWeight

BLOCK = 64
LEVELS = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
          -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
          0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
          0.7229568362236023, 1.0)
"""bitsandbytes' float32 values, bit for bit."""


ORDER = (0, 1, 2, 4, 8, 12, 13, 9, 3, 5, 7, 6, 11, 15, 14, 10)
"""The level of each stored code. Codes that differ in bit 3 alone have levels of one sign, whose low bytes
have the same highest bit in bfloat16 (and in float16, but for one pair)."""
IN_ORDER = tl.constexpr(tuple(LEVELS[at] for at in ORDER))


def tables(dtype: torch.dtype, levels: tuple[float, ...] = IN_ORDER.value) -> tuple[int, ...]:
    """What ``prmt`` picks from: a pair of words for each of low and high bytes, and codes below and above 8.

    ``levels`` are those of stored codes.

    A selector with bit 3 set gives the sign of the byte eight times over, instead of the byte. So one pick
    with the codes and one with bit 3 flipped, xor-ed, give what is wanted if each table allows for the
    other's signs. That works where the wanted bytes of both codes have the same sign; bits that don't are a
    third pair of words, one place too low.
    """
    value = torch.tensor(levels).to(dtype)
    value = torch.where(value == 0, -value, value)  # its partner is negative
    bits = [code & 0xFFFF for code in value.view(torch.int16).tolist()]
    words = []
    for shift in (0, 8):
        below, above = ([code >> shift & 255 for code in half] for half in (bits[:8], bits[8:]))
        wrong = [(code ^ other) & 128 for code, other in zip(below, above)]
        # signs of the second table are 0, so the first needn't allow for them
        first = [code ^ flip for code, flip in zip(below, wrong)]
        second = [code ^ 255 if sign & 128 else code for code, sign in zip(above, first)]
        parts = [first, second, [flip >> 1 for flip in wrong]]
        words += [int.from_bytes(bytes(part[at:at + 4]), "little") for part in parts for at in (0, 4)]
    return tuple(word - (word >> 31 << 32) for word in words)


def lookup_asm(dtype: torch.dtype, levels: tuple[float, ...] = IN_ORDER.value) -> str:
    """PTX that turns the eight codes of a word, ``$4``, into four pairs of ``dtype``, ``$0`` to ``$3``.

    ``$5`` to ``$16`` are :func:`tables`: in registers, because ``prmt`` takes one constant only.
    """
    known = tables(dtype, levels)

    def plane(to: str, at: int, codes: str, flipped: str) -> str:
        lines = f"""
        prmt.b32 a, ${5 + at}, ${6 + at}, {codes};
        prmt.b32 b, ${7 + at}, ${8 + at}, {flipped};"""
        if not any(known[at + 4:at + 6]):
            return lines + f"""
        xor.b32 {to}, a, b;"""
        return lines + f"""
        prmt.b32 c, ${9 + at}, ${10 + at}, {codes};
        shl.b32 c, c, 1;
        lop3.b32 {to}, a, b, c, 0x96;"""

    def half(codes: str, flipped: str, first: str, second: str) -> str:
        return plane("l", 0, codes, flipped) + plane("h", 6, codes, flipped) + f"""
        prmt.b32 {first}, l, h, 0x5140;
        prmt.b32 {second}, l, h, 0x7362;"""

    return """{
        .reg .b32 f, u, v, a, b, c, l, h;
        xor.b32 f, $4, 0x88888888;
        shr.u32 u, $4, 16;
        shr.u32 v, f, 16;""" + half("$4", "f", "$0", "$1") + half("u", "v", "$2", "$3") + "\n        }"


ASM_BF16 = tl.constexpr(lookup_asm(torch.bfloat16))
ASM_FP16 = tl.constexpr(lookup_asm(torch.float16))
TABLES_BF16 = tl.constexpr(tables(torch.bfloat16))
TABLES_FP16 = tl.constexpr(tables(torch.float16))
MAGIC_BF16, MAGIC_FP16 = tl.constexpr(MAGIC[torch.bfloat16]), tl.constexpr(MAGIC[torch.float16])


def twice(dtype: torch.dtype, levels: tuple[float, ...] = IN_ORDER.value) -> tl.constexpr:
    """The levels' bits in both halves of an int32."""
    halves = torch.tensor(levels).to(dtype).view(torch.int16).to(torch.int32) & 0xFFFF
    return tl.constexpr(tuple((halves | halves << 16).tolist()))


TWICE_BF16, TWICE_FP16 = twice(torch.bfloat16), twice(torch.float16)


@triton.jit
def _choose(a: tl.tensor, b: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Bits of b where the mask is set, else of a."""
    return a ^ ((a ^ b) & mask)


@triton.jit
def _all(t: tl.tensor) -> tl.tensor:
    """Bit 0 of each 16-bit half → that whole half."""
    return (t & 0x00010001) * 0xFFFF


@triton.jit
def look_up_pair(t: tl.tensor, T: tl.constexpr) -> tl.tensor:
    """Two codes, one in the lowest bits of each half → two levels: selections by masks, no branches."""
    m = _all(t)
    a, b = _choose(T[0], T[1], m), _choose(T[2], T[3], m)
    c, d = _choose(T[4], T[5], m), _choose(T[6], T[7], m)
    e, f = _choose(T[8], T[9], m), _choose(T[10], T[11], m)
    g, h = _choose(T[12], T[13], m), _choose(T[14], T[15], m)
    m = _all(t >> 1)
    a, b, c, d = _choose(a, b, m), _choose(c, d, m), _choose(e, f, m), _choose(g, h, m)
    m = _all(t >> 2)
    return _choose(_choose(a, b, m), _choose(c, d, m), _all(t >> 3))


@triton.jit
def look_up(q: tl.tensor, T: tl.constexpr) -> tl.tensor:
    """int32 codes → float32 levels."""
    v = tl.full(q.shape, T[0], tl.float32)
    for at in tl.static_range(1, 16):
        v = tl.where(q == at, T[at], v)
    return v


@triton.jit
def look_up_prmt(w: tl.tensor, magic: tl.tensor, T: tl.constexpr, ASM: tl.constexpr,
                 MAGIC: tl.constexpr) -> tl.tensor:
    """Words → their four pairs. The compiler must not know the tables, or would load them for every use."""
    z = magic ^ MAGIC
    return tl.inline_asm_elementwise(
        ASM, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [w, z ^ T[0], z ^ T[1], z ^ T[2], z ^ T[3], z ^ T[4], z ^ T[5], z ^ T[6], z ^ T[7], z ^ T[8],
         z ^ T[9], z ^ T[10], z ^ T[11]],
        (tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1)


@triton.jit
def decode_nf4(w: tl.tensor, s: tl.tensor, magic: tl.tensor, D: tl.constexpr, K: tl.constexpr,
               MODE: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Words and maxima of a tile → float32 ``[128]`` and D ``[128, K]``."""
    if D.is_fp32():
        v = look_up(nibbles(w, MODE == "prmt"), IN_ORDER)
    elif MODE == "prmt":
        if D.is_fp16():
            a, b, c, d = look_up_prmt(w, magic, TABLES_FP16, ASM_FP16, MAGIC_FP16)
        else:
            a, b, c, d = look_up_prmt(w, magic, TABLES_BF16, ASM_BF16, MAGIC_BF16)
        v = pairs(a, b, c, d, D)
    else:
        T: tl.constexpr = TWICE_FP16 if D.is_fp16() else TWICE_BF16
        v = pairs(look_up_pair(w, T), look_up_pair(w >> 4, T), look_up_pair(w >> 8, T),
                  look_up_pair(w >> 12, T), D)
    return s, tile(v, K, 64, 1, WIDE)


@triton.jit
def number(tile_ptr: tl.tensor, s: tl.tensor, row: tl.tensor, col: tl.tensor, K: tl.constexpr,
           MODE: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Single numbers of tiles, float32."""
    word, c, e, h = place(row, col, 64, 1, WIDE)
    shift = 4 * e + 8 * c + 16 * h if MODE == "prmt" else 16 * e + 4 * c + 8 * h
    return look_up((tl.load(tile_ptr + word) >> shift) & 15, IN_ORDER) * s


NF4 = TritonDecoder(decode_nf4, number)


def pack(codes: torch.Tensor, absmax: torch.Tensor, family: str | None = None, mode: str | None = None,
         gated: bool = False) -> TritonWeight:
    """Repack once.

    Args:
        codes: uint8 ``[n, k]``, 0 to 15, k a multiple of 64.
        absmax: float32 ``[n * k / 64]``, a block of the flattened weight each.
        family: the GPUs' family; by default that of the tensors' device.
        mode: ``prmt`` (NVIDIA only) or ``select``; by default what the device runs.
        gated: rows are a gate's, then as many of what it opens.

    Raises:
        ValueError: k isn't a multiple of 64.
    """
    n, k = codes.shape
    if k % BLOCK:
        raise ValueError(f"columns must be a multiple of {BLOCK}, not {k}")
    family = family or family_of(codes.device)
    mode = mode or ("prmt" if codes.is_cuda and family != "cdna" else "select")
    scale = rows(absmax.float().reshape(n, k // BLOCK), gated).T.contiguous()
    stored = torch.tensor([ORDER.index(at) for at in range(16)], dtype=torch.uint8, device=codes.device)
    # an index takes eight bytes: not all at once
    kept = torch.cat([stored[part.int()] for part in codes.split(ROWS)])
    words = shuffle(rows(kept, gated), 4, BLOCK, lane_columns(family), mode == "prmt")
    return TritonWeight(words, scale, n, k, BLOCK, BLOCK, mode, family, NF4, gated)
