"""8-bit weights with one scale a row by 8-bit activations with one scale a token.

int8 by int8 is summed in 32-bit integers, exactly. Numbers of e4m3 are multiplied as such by the tensor cores
that can (mode ``e4m3``); others multiply them as float16, which holds every one of them exactly (mode
``float16``): the activations come as float16 then, see
:class:`~quantkit_kernels.triton.levels.QuantizedActivations`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quantkit_kernels.triton import fp8
from quantkit_kernels.triton.fragment import arrange, family_of, plain_place, plain_tile, rows, whole_tiles
from quantkit_kernels.triton.packed import TritonDecoder, TritonWeight

BK = 128
"""Columns of a tile."""
MOST_COLUMNS = 2**31 // (128 * 127)
"""Products that certainly fit into 32 bits."""


@triton.jit
def decode_bytes(w: tl.tensor, s: tl.tensor, magic: tl.tensor, D: tl.constexpr, K: tl.constexpr,
                 MODE: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Bytes of a tile → nothing, and the same bytes ``[128, K]`` as D."""
    return s, plain_tile(w, K, 4)


@triton.jit
def number(tile_ptr: tl.tensor, s: tl.tensor, row: tl.tensor, col: tl.tensor, K: tl.constexpr,
           MODE: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Single numbers of tiles, float32."""
    return tl.load(tile_ptr + plain_place(row, col, 4)).to(tl.float32) * s


INT8 = TritonDecoder(decode_bytes, number, (torch.int8,), levels=True)
NATIVE = TritonDecoder(decode_bytes, number, (torch.float8_e4m3fn,), levels=True)
HALF = TritonDecoder(fp8.decode_e4m3, fp8.number, (torch.float16,), levels=True)


def pack(codes: torch.Tensor, scale: torch.Tensor, family: str | None = None, mode: str | None = None,
         gated: bool = False) -> TritonWeight:
    """Repack once.

    Args:
        codes: int8 or float8_e4m3fn ``[n, k]``, none of them NaN.
        scale: the rows' scales, float ``[n]``.
        family: the GPUs' family; by default that of the tensors' device.
        mode: how e4m3 is multiplied, ``e4m3`` or ``float16``; by default what the device runs.
        gated: rows are a gate's, then as many of what it opens.

    Raises:
        ValueError: codes of another dtype, or more columns of int8 than a 32-bit sum takes.
    """
    n, k = codes.shape
    if codes.dtype not in (torch.int8, torch.float8_e4m3fn):
        raise ValueError(f"codes must be int8 or float8_e4m3fn, not {codes.dtype}")
    if codes.dtype == torch.int8 and k > MOST_COLUMNS:
        raise ValueError(f"up to {MOST_COLUMNS} products are added in 32 bits, not {k}")
    family = family or family_of(codes.device)
    if codes.dtype == torch.float8_e4m3fn:
        native = codes.is_cuda and family in ("hopper", "blackwell")
        if (mode or ("e4m3" if native else "float16")) == "float16":
            return fp8.pack(codes, scale, family, gated, HALF)
    tiles = whole_tiles(codes.view(torch.int8), BK, gated)
    decoder = INT8 if codes.dtype == torch.int8 else NATIVE
    return TritonWeight(arrange(tiles, BK).view(codes.dtype), rows(scale.float(), gated), n, k, BK, 0,
                        "int8" if decoder is INT8 else "e4m3", family, decoder, gated)
