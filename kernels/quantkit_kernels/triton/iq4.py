"""4-bit weights whose levels are the integers of llama.cpp's IQ4_NL: ``y = x Wᵀ``, ``w = table[q] · scale``.

https://github.com/ggml-org/llama.cpp/pull/5590. Levels are exact in bfloat16 and in float16; scales, of
groups of 32 or more, multiply the float32 sum of a group. Codes are looked up as those of
:mod:`~quantkit_kernels.triton.nf4` are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quantkit_kernels.triton.fragment import (
    MAGIC,
    family_of,
    lane_columns,
    nibbles,
    pairs,
    place,
    shuffle,
    tile,
    whole_tiles,
)
from quantkit_kernels.triton.nf4 import look_up, look_up_pair, look_up_prmt, lookup_asm, tables, twice
from quantkit_kernels.triton.packed import TritonDecoder, TritonWeight

LEVELS = (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0,
          1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0)
ORDER = (0, 2, 4, 6, 10, 14, 9, 8, 1, 3, 5, 7, 13, 15, 11, 12)
"""The level of each stored code. Codes that differ in bit 3 alone have levels of one sign, whose low bytes
have, but for two pairs, the same highest bit in bfloat16."""
IN_ORDER = tl.constexpr(tuple(LEVELS[at] for at in ORDER))
ASM_BF16 = tl.constexpr(lookup_asm(torch.bfloat16, IN_ORDER.value))
ASM_FP16 = tl.constexpr(lookup_asm(torch.float16, IN_ORDER.value))
TABLES_BF16 = tl.constexpr(tables(torch.bfloat16, IN_ORDER.value))
TABLES_FP16 = tl.constexpr(tables(torch.float16, IN_ORDER.value))
MAGIC_BF16, MAGIC_FP16 = tl.constexpr(MAGIC[torch.bfloat16]), tl.constexpr(MAGIC[torch.float16])
TWICE_BF16, TWICE_FP16 = twice(torch.bfloat16, IN_ORDER.value), twice(torch.float16, IN_ORDER.value)


@triton.jit
def decode_iq4(w: tl.tensor, s: tl.tensor, magic: tl.tensor, D: tl.constexpr, K: tl.constexpr,
               MODE: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Words of a tile → nothing, and levels, D ``[128, K]``."""
    SPAN: tl.constexpr = 64 if K >= 64 else 32
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
    return s, tile(v, K, SPAN, 64 // SPAN, WIDE)


@triton.jit
def number(tile_ptr: tl.tensor, s: tl.tensor, row: tl.tensor, col: tl.tensor, K: tl.constexpr,
           MODE: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Single levels of tiles, float32."""
    SPAN: tl.constexpr = 64 if K >= 64 else 32
    word, c, e, h = place(row, col, SPAN, 64 // SPAN, WIDE)
    shift = 4 * e + 8 * c + 16 * h if MODE == "prmt" else 16 * e + 4 * c + 8 * h
    return look_up((tl.load(tile_ptr + word) >> shift) & 15, IN_ORDER)


IQ4 = TritonDecoder(decode_iq4, number)


def pack(codes: torch.Tensor, scales: tuple[torch.Tensor, str], group: int, family: str | None = None,
         mode: str | None = None, gated: bool = False) -> TritonWeight:
    """Repack once.

    Args:
        codes: uint8 ``[n, k]``, 0 to 15.
        scales: the result of :mod:`~quantkit_kernels.triton.group_scales`.
        group: columns that share a scale: 32, 64 or a multiple of 128.
        family: the GPUs' family; by default that of the tensors' device.
        mode: ``prmt`` (NVIDIA only) or ``select``; by default what the device runs.
        gated: rows are a gate's, then as many of what it opens.
    """
    (n, k), bk, family = codes.shape, min(group, 128), family or family_of(codes.device)
    mode = mode or ("prmt" if codes.is_cuda and family != "cdna" else "select")
    stored = torch.tensor([ORDER.index(at) for at in range(16)], dtype=torch.uint8, device=codes.device)
    # an index takes eight bytes: not all at once
    kept = torch.cat([stored[part.int()] for part in codes.split(128)])
    words = shuffle(whole_tiles(kept, bk, gated), 4, bk, lane_columns(family), mode == "prmt")
    return TritonWeight(words, scales[0], n, k, bk, group, mode, family, IQ4, gated, scales[1])
