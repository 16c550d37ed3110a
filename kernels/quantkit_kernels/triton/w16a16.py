"""Plain 16-bit weights, 16-bit activations: ``y = x Wᵀ``.

For the parts of a model that stay as they are: at the speed of memory for few rows, and a row's bits don't
depend on how many there are, which libraries don't promise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quantkit_kernels.triton.fragment import arrange, family_of, plain_place, plain_tile, whole_tiles
from quantkit_kernels.triton.packed import FLOATS, TritonDecoder, TritonWeight

BK = 64
"""Columns of a tile."""


@triton.jit
def decode_plain(w: tl.tensor, s: tl.tensor, magic: tl.tensor, D: tl.constexpr, K: tl.constexpr,
                 MODE: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Numbers of a tile → nothing, and the same numbers ``[128, K]``."""
    return s, plain_tile(w, K, 2)


@triton.jit
def number(tile_ptr: tl.tensor, s: tl.tensor, row: tl.tensor, col: tl.tensor, K: tl.constexpr,
           MODE: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Single numbers of tiles, float32."""
    return tl.load(tile_ptr + plain_place(row, col, 2)).to(tl.float32)


PLAIN = TritonDecoder(decode_plain, number)


def pack(weight: torch.Tensor, family: str | None = None, gated: bool = False) -> TritonWeight:
    """Reorder once.

    Args:
        weight: ``[n, k]``, bfloat16, float16 or float32 (slow: for the interpreter); activations have the
            same dtype.
        family: the GPUs' family; by default that of the tensors' device.
        gated: rows are a gate's, then as many of what it opens.

    Raises:
        ValueError: another dtype.
    """
    if weight.dtype not in FLOATS:
        raise ValueError(f"weights must be bfloat16, float16 or float32, not {weight.dtype}")
    n, k = weight.shape
    words = arrange(whole_tiles(weight, BK, gated), BK)
    return TritonWeight(words, None, n, k, BK, 0, "plain", family or family_of(weight.device), PLAIN, gated)
