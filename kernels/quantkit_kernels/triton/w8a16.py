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
from quantkit_kernels.triton.packed import TritonDecoder, TritonWeight

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


INT8 = TritonDecoder(decode_int8, number)


def pack(codes: torch.Tensor, scale: torch.Tensor, family: str | None = None,
         gated: bool = False) -> TritonWeight:
    """Repack once.

    Args:
        codes: int8 ``[n, k]``.
        scale: float ``[n]``.
        family: of GPUs; by default that of the tensors' device.
        gated: rows are a gate's, then as many of what it opens.
    """
    n, k = codes.shape
    family = family or family_of(codes.device)
    padded = whole_tiles(codes.view(torch.uint8), BK, gated)
    words = shuffle(padded, 8, BK, lane_columns(family))
    return TritonWeight(words, rows(scale.float(), gated), n, k, BK, 0, "row", family, INT8, gated)
