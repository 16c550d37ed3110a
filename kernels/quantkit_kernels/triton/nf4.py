"""4-bit NormalFloat weights in blocks of 64, 16-bit activations: ``y = x Wᵀ``, ``w = table[q] · absmax``.

QLoRA, https://arxiv.org/abs/2305.14314. The sixteen levels are rounded to x's dtype; a block's absolute
maximum, float32, multiplies the float32 sum of a block.

On NVIDIA GPUs four codes at a time are looked up by ``prmt``, which picks bytes out of two registers: the
levels' low and high bytes lie in four registers each, half of them for codes up to 7. The twin in plain
Triton selects by masks, two codes at a time; it serves other GPUs and the interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn.functional import pad

from quantkit_kernels.triton.fragment import (
    ROWS,
    family_of,
    lane_columns,
    nibbles,
    pairs,
    shuffle,
    tile,
)
from quantkit_kernels.triton.matmul import Packed, multiply

BLOCK = 64
LEVELS = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
          -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
          0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
          0.7229568362236023, 1.0)
"""bitsandbytes' float32 values, bit for bit."""


def lookup_asm(dtype: torch.dtype) -> str:
    """PTX that turns the eight codes of a word, ``$4``, into four pairs of ``dtype``, ``$0`` to ``$3``."""
    bits = [value & 0xFFFF for value in torch.tensor(LEVELS).to(dtype).view(torch.int16).tolist()]
    low, high = ([value >> shift & 255 for value in bits] for shift in (0, 8))
    table = [f"0x{int.from_bytes(bytes(part[at:at + 4]), 'little'):08x}"
             for part in (low, high) for at in (0, 4, 8, 12)]

    def half(select: str, top: str, first: str, second: str) -> str:
        """Four codes: m is 0xff where a code is above 7."""
        return f"""
        prmt.b32 m, 0x0000ff00, 0, {top};
        prmt.b32 a, {table[0]}, {table[1]}, {select};
        prmt.b32 b, {table[2]}, {table[3]}, {select};
        lop3.b32 l, m, b, a, 0xCA;
        prmt.b32 a, {table[4]}, {table[5]}, {select};
        prmt.b32 b, {table[6]}, {table[7]}, {select};
        lop3.b32 h, m, b, a, 0xCA;
        prmt.b32 {first}, l, h, 0x5140;
        prmt.b32 {second}, l, h, 0x7362;"""

    return """{
        .reg .b32 s, u, t, v, m, a, b, l, h;
        and.b32 s, $4, 0x77777777;
        shr.u32 u, s, 16;
        shr.u32 t, $4, 3;
        and.b32 t, t, 0x11111111;
        shr.u32 v, t, 16;""" + half("s", "t", "$0", "$1") + half("u", "v", "$2", "$3") + "\n        }"


ASM_BF16 = tl.constexpr(lookup_asm(torch.bfloat16))
ASM_FP16 = tl.constexpr(lookup_asm(torch.float16))


def _twice(dtype: torch.dtype) -> tl.constexpr:
    """The levels' bits in both halves of an int32."""
    halves = torch.tensor(LEVELS).to(dtype).view(torch.int16).to(torch.int32) & 0xFFFF
    return tl.constexpr(tuple((halves | halves << 16).tolist()))


TWICE_BF16, TWICE_FP16 = _twice(torch.bfloat16), _twice(torch.float16)


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
def look_up(q: tl.tensor) -> tl.tensor:
    """int32 codes → float32 levels."""
    a, b, c, d = (q & 1) == 1, (q & 2) == 2, (q & 4) == 4, (q & 8) == 8
    low = tl.where(c, tl.where(b, tl.where(a, 0.0, -0.09105003625154495),
                               tl.where(a, -0.18477343022823334, -0.28444138169288635)),
                   tl.where(b, tl.where(a, -0.39491748809814453, -0.5250730514526367),
                            tl.where(a, -0.6961928009986877, -1.0)))
    high = tl.where(c, tl.where(b, tl.where(a, 1.0, 0.7229568362236023),
                                tl.where(a, 0.5626170039176941, 0.44070982933044434)),
                    tl.where(b, tl.where(a, 0.33791524171829224, 0.24611230194568634),
                             tl.where(a, 0.16093020141124725, 0.07958029955625534)))
    return tl.where(d, high, low)


@triton.jit
def decode_nf4(w: tl.tensor, s: tl.tensor, magic: tl.tensor, D: tl.constexpr, K: tl.constexpr,
               MODE: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Words and maxima of a tile → float32 ``[128]`` and D ``[128, K]``."""
    if D.is_fp32():
        v = look_up(nibbles(w, MODE == "prmt"))
    elif MODE == "prmt":
        a, b, c, d = tl.inline_asm_elementwise(
            ASM_FP16 if D.is_fp16() else ASM_BF16, "=r,=r,=r,=r,r", [w],
            (tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1)
        v = pairs(a, b, c, d, D)
    else:
        T: tl.constexpr = TWICE_FP16 if D.is_fp16() else TWICE_BF16
        v = pairs(look_up_pair(w, T), look_up_pair(w >> 4, T), look_up_pair(w >> 8, T),
                  look_up_pair(w >> 12, T), D)
    return s, tile(v, K, 64, 1, WIDE)


def pack(codes: torch.Tensor, absmax: torch.Tensor, family: str | None = None,
         mode: str | None = None) -> Packed:
    """Repack once.

    Args:
        codes: uint8 ``[n, k]``, 0 to 15, k a multiple of 64.
        absmax: float32 ``[n * k / 64]``, a block of the flattened weight each.
        family: of GPUs; by default that of the tensors' device.
        mode: ``prmt`` (NVIDIA only) or ``select``; by default what the device runs.

    Raises:
        ValueError: k isn't a multiple of 64.
    """
    n, k = codes.shape
    if k % BLOCK:
        raise ValueError(f"columns must be a multiple of {BLOCK}, not {k}")
    family = family or family_of(codes.device)
    mode = mode or ("prmt" if codes.is_cuda and family != "cdna" else "select")
    down = -n % ROWS
    scale = pad(absmax.float().reshape(n, k // BLOCK), (0, 0, 0, down)).T.contiguous()
    words = shuffle(pad(codes, (0, 0, 0, down)), 4, BLOCK, lane_columns(family), mode == "prmt")
    return Packed(words, scale, n, k, BLOCK, BLOCK, mode, family)


def nf4(x: torch.Tensor, weight: Packed) -> torch.Tensor:
    """``x [m, k]`` (bfloat16, float16, float32) → ``[m, n]`` in x's dtype, for a weight of :func:`pack`."""
    return multiply(x, weight, decode_nf4)
