"""8-bit integer weights with one scale a row, 16-bit activations: ``y = x Wᵀ``, ``w = q · scale``.

Codes become half-precision numbers exactly, by bit operations on pairs; the scale multiplies the finished
sum. https://arxiv.org/abs/2211.10017
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quantkit_kernels.triton.fragment import (
    family_of,
    int8_pair,
    lane_columns,
    place,
    rows,
    shuffle,
    tile,
    whole_tiles,
)
from quantkit_kernels.triton.group_scales import fine_half, fine_scales, relative_halves
from quantkit_kernels.triton.packed import TritonDecoder, TritonWeight
from quantkit_kernels.triton.w4a16 import scale_of

BK = 64
"""Columns of a tile."""


@triton.jit
def decode_int8(w: tl.tensor, s: tl.tensor, magic: tl.tensor, D: tl.constexpr, K: tl.constexpr,
                MODE: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Words of a tile → nothing, and D ``[128, K]``."""
    a0, a1 = int8_pair(w, magic, D)
    b0, b1 = int8_pair(w >> 8, magic, D)
    v = tl.join(tl.join(a0, a1), tl.join(b0, b1))
    return s, tile(v, K, 32, 1, WIDE)


@triton.jit
def number(tile_ptr: tl.tensor, s: tl.tensor, row: tl.tensor, col: tl.tensor, K: tl.constexpr,
           MODE: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Single numbers of tiles, float32."""
    word, c, e, h = place(row, col, 32, 1, WIDE)
    q = tl.load(tile_ptr + word * 2 + c) >> (16 * e + 8 * h)
    return ((q << 24) >> 24).to(tl.float32) * s


@triton.jit
def code(tile_ptr: tl.tensor, s: tl.tensor, row: tl.tensor, col: tl.tensor, K: tl.constexpr,
         MODE: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Single codes of tiles, float32."""
    return number(tile_ptr, 1.0, row, col, K, MODE, WIDE)


@triton.jit
def decode_int8_fine(w: tl.tensor, s: tl.tensor, magic: tl.tensor, D: tl.constexpr, K: tl.constexpr,
                     MODE: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Words of a tile and their scales → nothing, and weights, D ``[128, K]``, each rounded once."""
    a0, a1 = int8_pair(w, magic, D)
    b0, b1 = int8_pair(w >> 8, magic, D)
    v = tl.join(tl.join(a0, a1), tl.join(b0, b1))
    return s, tile(v * fine_half(s, D).reshape(w.shape[0], 1, 2), K, 32, 1, WIDE)


@triton.jit
def fine_number(tile_ptr: tl.tensor, s: tl.tensor, row: tl.tensor, col: tl.tensor, K: tl.constexpr,
                MODE: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Single weights of tiles, float32."""
    _, _, _, h = place(row, col, 32, 1, WIDE)
    return number(tile_ptr, scale_of(s >> (16 * h), "float16"), row, col, K, MODE, WIDE)


INT8 = TritonDecoder(decode_int8, number)
INT8_GROUPS = TritonDecoder(decode_int8, code)
UINT8_GROUPS = TritonDecoder(decode_int8, code, zero_level=128.0)
INT8_FINE = TritonDecoder(decode_int8_fine, fine_number)


def pack(codes: torch.Tensor, scale: torch.Tensor, family: str | None = None,
         gated: bool = False) -> TritonWeight:
    """Repack once.

    Args:
        codes: int8 ``[n, k]``.
        scale: the rows' scales, float ``[n]``.
        family: the GPUs' family; by default that of the tensors' device.
        gated: rows are a gate's, then as many of what it opens.
    """
    n, k = codes.shape
    family = family or family_of(codes.device)
    padded = whole_tiles(codes.view(torch.uint8), BK, gated)
    words = shuffle(padded, 8, BK, lane_columns(family))
    return TritonWeight(words, rows(scale.float(), gated), n, k, BK, 0, "row", family, INT8, gated)


def pack_groups(codes: torch.Tensor, scales: tuple[torch.Tensor, str], group: int, family: str | None = None,
                gated: bool = False, unsigned: bool = False) -> TritonWeight:
    """Repack weights in groups, with minima or without, once.

    Args:
        codes: int8 ``[n, k]``.
        scales: the result of :mod:`~quantkit_kernels.triton.group_scales` for scales, and of minima.
        group: columns that share a scale: 32, or a multiple of 64.
        family: the GPUs' family; by default that of the tensors' device.
        gated: rows are a gate's, then as many of what it opens.
        unsigned: minima are of codes that are 128 more.
    """
    (n, k), bk, family = codes.shape, min(group, BK), family or family_of(codes.device)
    words = shuffle(whole_tiles(codes.view(torch.uint8), bk, gated), 8, bk, lane_columns(family))
    return TritonWeight(words, scales[0], n, k, bk, group, scales[1], family,
                        UINT8_GROUPS if unsigned else INT8_GROUPS, gated, scales[1])


def pack_fine(codes: torch.Tensor, scale: torch.Tensor, family: str | None = None,
              gated: bool = False) -> TritonWeight:
    """Repack weights in groups of 16, once.

    Args:
        codes: int8 ``[n, k]``.
        scale: float32 ``[n, k / 16]``, of which float16 holds as much as it does.
        family: the GPUs' family; by default that of the tensors' device.
        gated: rows are a gate's, then as many of what it opens.
    """
    (n, k), family = codes.shape, family or family_of(codes.device)
    words = shuffle(whole_tiles(codes.view(torch.uint8), BK, gated), 8, BK, lane_columns(family))
    scales = fine_scales(*relative_halves(scale), BK, 8, gated)
    return TritonWeight(words, scales, n, k, BK, 0, "float16", family, INT8_FINE, gated, "fine")
