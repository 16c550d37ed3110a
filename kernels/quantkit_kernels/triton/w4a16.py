"""4-bit integer weights in groups, 16-bit activations: ``y = x Wᵀ``, ``w = (q − zero) · scale``.

Codes become half-precision numbers by bit operations: ``0x4300 | q`` is 128 + q in bfloat16, ``0x6400 | q``
is 1024 + q in float16, both exactly; one packed subtraction then leaves ``q − zero``, also exactly. The
scale multiplies the float32 sum of a group. So the only roundings are the tensor core's sums and the
result's. https://arxiv.org/abs/2211.10017

Symmetric weights keep a float32 scale a group; asymmetric ones a 32-bit word, a 16-bit scale below and the
zero point above it: 4 bytes a group either way, which is the least that is copied asynchronously.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quantkit_kernels.triton.fragment import (
    by_word,
    family_of,
    lane_columns,
    nibbles,
    pairs,
    place,
    rows,
    shuffle,
    tile,
    whole_tiles,
)
from quantkit_kernels.triton.group_scales import fine_half, fine_scales, relative_halves
from quantkit_kernels.triton.packed import TritonDecoder, TritonWeight

GROUPS = (32, 64, 128)
"""Group sizes; multiples of 128 work too."""


@triton.jit
def scale_of(s: tl.tensor, MODE: tl.constexpr) -> tl.tensor:
    """The scale in a group's word, float32."""
    if MODE == "symmetric":
        scale = s
    elif MODE == "bfloat16":
        scale = (s << 16).to(tl.float32, bitcast=True)
    else:
        scale = (s & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale


@triton.jit
def decode_int4(w: tl.tensor, s: tl.tensor, magic: tl.tensor, D: tl.constexpr, K: tl.constexpr,
                MODE: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Words and scales of a tile → float32 ``[128]`` and D ``[128, K]``."""
    SPAN: tl.constexpr = 64 if K >= 64 else 32
    BIAS: tl.constexpr = 1024 if D.is_fp16() else 128
    scale = scale_of(s, MODE)
    if D.is_fp32():
        v = tile(nibbles(w, False).to(tl.float32), K, SPAN, 64 // SPAN, WIDE)
        a = v - 8.0 if MODE == "symmetric" else v - (s >> 16).to(tl.float32)[:, None]
    elif MODE == "symmetric":
        v = pairs((w & 0x000F000F) | magic, ((w >> 4) & 0x000F000F) | magic,
                  ((w >> 8) & 0x000F000F) | magic, ((w >> 12) & 0x000F000F) | magic, D)
        a = tile(v - (BIAS + 8.0), K, SPAN, 64 // SPAN, WIDE)
    else:
        # 16 - zero keeps the sum of integers above the bias, where floats are 1 apart
        low, high = by_word(magic + (16 - (s >> 16)) * 0x00010001, K, SPAN, 64 // SPAN)
        v = pairs((w & 0x000F000F) + low, ((w >> 4) & 0x000F000F) + low,
                  ((w >> 8) & 0x000F000F) + high, ((w >> 12) & 0x000F000F) + high, D)
        a = tile(v - (BIAS + 16.0), K, SPAN, 64 // SPAN, WIDE)
    return scale, a


@triton.jit
def number(tile_ptr: tl.tensor, s: tl.tensor, row: tl.tensor, col: tl.tensor, K: tl.constexpr,
           MODE: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Single numbers of tiles, float32."""
    SPAN: tl.constexpr = 64 if K >= 64 else 32
    word, c, e, h = place(row, col, SPAN, 64 // SPAN, WIDE)
    q = ((tl.load(tile_ptr + word) >> (16 * e + 4 * c + 8 * h)) & 15).to(tl.float32)
    zero = 8.0 if MODE == "symmetric" else (s >> 16).to(tl.float32)
    return (q - zero) * scale_of(s, MODE)


@triton.jit
def _codes(w: tl.tensor, magic: tl.tensor, D: tl.constexpr, MIDDLE: tl.constexpr) -> tl.tensor:
    """Words → codes less MIDDLE, D ``[words, c, e, h]``."""
    BIAS: tl.constexpr = 1024 if D.is_fp16() else 128
    if D.is_fp32():
        v = nibbles(w, False).to(tl.float32) - MIDDLE
    else:
        v = pairs((w & 0x000F000F) | magic, ((w >> 4) & 0x000F000F) | magic,
                  ((w >> 8) & 0x000F000F) | magic, ((w >> 12) & 0x000F000F) | magic, D) - (BIAS + MIDDLE)
    return v


@triton.jit
def decode_uint4(w: tl.tensor, s: tl.tensor, magic: tl.tensor, D: tl.constexpr, K: tl.constexpr,
                 MODE: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Words of a tile → nothing, and codes, D ``[128, K]``."""
    SPAN: tl.constexpr = 64 if K >= 64 else 32
    return s, tile(_codes(w, magic, D, 0.0), K, SPAN, 64 // SPAN, WIDE)


@triton.jit
def decode_int4_fine(w: tl.tensor, s: tl.tensor, magic: tl.tensor, D: tl.constexpr, K: tl.constexpr,
                     MODE: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Words of a tile and their scales → nothing, and weights, D ``[128, K]``, each rounded once."""
    return s, tile(_codes(w, magic, D, 8.0) * fine_half(s, D), K, 64, 1, WIDE)


@triton.jit
def code(tile_ptr: tl.tensor, s: tl.tensor, row: tl.tensor, col: tl.tensor, K: tl.constexpr,
         MODE: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Single codes of tiles, float32."""
    SPAN: tl.constexpr = 64 if K >= 64 else 32
    word, c, e, h = place(row, col, SPAN, 64 // SPAN, WIDE)
    return ((tl.load(tile_ptr + word) >> (16 * e + 4 * c + 8 * h)) & 15).to(tl.float32)


@triton.jit
def fine_number(tile_ptr: tl.tensor, s: tl.tensor, row: tl.tensor, col: tl.tensor, K: tl.constexpr,
                MODE: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Single weights of tiles, float32."""
    _, _, _, h = place(row, col, 64, 1, WIDE)
    scale = scale_of(s >> (16 * h), "float16")
    return (code(tile_ptr, s, row, col, K, MODE, WIDE) - 8.0) * scale


INT4 = TritonDecoder(decode_int4, number)
UINT4 = TritonDecoder(decode_uint4, code)
INT4_FINE = TritonDecoder(decode_int4_fine, fine_number)


def pack(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None,
         family: str | None = None, gated: bool = False) -> TritonWeight:
    """Repack once.

    Args:
        codes: uint8 ``[n, k]``, 0 to 15.
        scale: float ``[n, k / group]``, group 32, 64 or a multiple of 128, or the whole row.
        zero: integers of the same shape, 0 to 15; ``None``: 8 everywhere.
        family: the GPUs' family; by default that of the tensors' device.
        gated: rows are a gate's, then as many of what it opens.

    Raises:
        ValueError: such groups don't exist, or asymmetric scales that 16 bits can't hold.
    """
    n, k = codes.shape
    groups, group = scale.shape[1], k // scale.shape[1]
    if groups == 1 and group not in GROUPS:
        group = -(-k // 128) * 128
    elif k % groups or (group not in GROUPS and group % 128):
        raise ValueError(f"groups must be 32, 64 or a multiple of 128 columns, not {k} / {groups}")
    bk = min(group, 128)
    scales, mode = rows(scale.float(), gated).T.contiguous(), "symmetric"
    if zero is not None:
        scales, mode = _with_zeros(scales, rows(zero.to(torch.int32), gated).T)
    family = family or family_of(codes.device)
    words = shuffle(whole_tiles(codes, bk, gated), 4, bk, lane_columns(family))
    return TritonWeight(words, scales, n, k, bk, group, mode, family, INT4, gated)


def pack_minima(codes: torch.Tensor, scales: tuple[torch.Tensor, str], group: int,
                family: str | None = None, gated: bool = False) -> TritonWeight:
    """Repack weights with minima, ``w = q · scale + minimum``, once.

    Args:
        codes: uint8 ``[n, k]``, 0 to 15.
        scales: the result of :mod:`~quantkit_kernels.triton.group_scales` for scales and minima.
        group: columns that share them: 32, 64 or a multiple of 128.
        family: the GPUs' family; by default that of the tensors' device.
        gated: rows are a gate's, then as many of what it opens.
    """
    (n, k), bk, family = codes.shape, min(group, 128), family or family_of(codes.device)
    words = shuffle(whole_tiles(codes, bk, gated), 4, bk, lane_columns(family))
    return TritonWeight(words, scales[0], n, k, bk, group, scales[1], family, UINT4, gated, scales[1])


def pack_fine(codes: torch.Tensor, scale: torch.Tensor, family: str | None = None,
              gated: bool = False) -> TritonWeight:
    """Repack weights in groups of 16, without zero points, once.

    Args:
        codes: uint8 ``[n, k]``, 0 to 15.
        scale: float32 ``[n, k / 16]``, of which float16 holds as much as it does.
        family: the GPUs' family; by default that of the tensors' device.
        gated: rows are a gate's, then as many of what it opens.
    """
    (n, k), family = codes.shape, family or family_of(codes.device)
    words = shuffle(whole_tiles(codes, 64, gated), 4, 64, lane_columns(family))
    scales = fine_scales(*relative_halves(scale), 64, 4, gated)
    return TritonWeight(words, scales, n, k, 64, 0, "float16", family, INT4_FINE, gated, "fine")


def _with_zeros(scale: torch.Tensor, zero: torch.Tensor) -> tuple[torch.Tensor, str]:
    for dtype in (torch.bfloat16, torch.float16):
        half = scale.to(dtype)
        if torch.equal(half.float(), scale):
            low = half.view(torch.int16).to(torch.int32) & 0xFFFF
            return low | (zero << 16), str(dtype).removeprefix("torch.")
    raise ValueError("asymmetric weights need scales that bfloat16 or float16 holds exactly")
