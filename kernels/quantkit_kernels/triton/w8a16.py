"""8-bit integer weights with one scale a row, 16-bit activations: ``y = x Wᵀ``, ``w = q · scale``.

Codes become half-precision numbers exactly, by bit operations on pairs; the scale multiplies the finished
sum. https://arxiv.org/abs/2211.10017
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn.functional import pad

from quantkit_kernels.triton.fragment import ROWS, family_of, int8_pair, lane_columns, shuffle, tile
from quantkit_kernels.triton.matmul import Packed, multiply

BK = 64
"""Columns of a tile."""


@triton.jit
def decode_int8(w: tl.tensor, magic: tl.tensor, D: tl.constexpr, K: tl.constexpr,
                WIDE: tl.constexpr) -> tl.tensor:
    """Words of a tile → D ``[128, K]``."""
    a0, a1 = int8_pair(w, magic, D)
    b0, b1 = int8_pair(w >> 8, magic, D)
    v = tl.join(tl.join(a0, a1), tl.join(b0, b1))
    return tile(v, K, 32, 1, WIDE)


def pack(codes: torch.Tensor, scale: torch.Tensor, family: str | None = None) -> Packed:
    """Repack once.

    Args:
        codes: int8 ``[n, k]``.
        scale: float ``[n]``.
        family: of GPUs; by default that of the tensors' device.
    """
    n, k = codes.shape
    family = family or family_of(codes.device)
    padded = pad(codes.view(torch.uint8), (0, -k % BK, 0, -n % ROWS))
    words = shuffle(padded, 8, BK, lane_columns(family))
    return Packed(words, scale.float().contiguous(), n, k, BK, 0, "row", family)


def w8a16(x: torch.Tensor, weight: Packed) -> torch.Tensor:
    """``x [m, k]`` (bfloat16, float16, float32) → ``[m, n]`` in x's dtype, for a weight of :func:`pack`."""
    return multiply(x, weight, decode_int8)
