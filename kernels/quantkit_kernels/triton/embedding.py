"""Embedding lookup in a packed weight, for models whose embedding table is also the output head.

Only the rows that are looked up are read and decoded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quantkit_kernels.triton.fragment import ROWS, lane_columns, place
from quantkit_kernels.triton.group_scales import fine_at, scales_at
from quantkit_kernels.triton.packed import TritonWeight, bits

BLOCK = 512
"""Numbers of a row that one program decodes."""


@triton.jit
def embed_kernel(ids_ptr: tl.tensor, w_ptr: tl.tensor, s_ptr: tl.tensor, y_ptr: tl.tensor, y_row: tl.tensor,
                 table_ptr: tl.tensor, K: tl.constexpr, BK: tl.constexpr, WORDS: tl.constexpr,
                 TILES: tl.constexpr, GROUP: tl.constexpr, NPAD: tl.constexpr, NUMBER: tl.constexpr,
                 MODE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, LAYOUT: tl.constexpr,
                 MIDDLE: tl.constexpr, BITS: tl.constexpr) -> None:
    """Decode BLOCK numbers of one row.

    ids is ``[m]``, y is ``[m, K]`` with rows y_row apart; the weight is packed as for a matrix product.
    """
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(ids_ptr + index).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seen = col < K
    col = tl.where(seen, col, 0)
    tile = row // 128 * TILES + col // BK
    lane = (row % 128).to(tl.int32)
    if LAYOUT == "fine":
        SPAN: tl.constexpr = 64 if BITS == 4 else 32
        word, c, _, _ = place(lane, col % BK, SPAN, 1, WIDE)
        s = fine_at(s_ptr, tile, word if BITS == 4 else word * 2 + c, NPAD, WORDS, BITS, MODE)
        v = NUMBER(w_ptr + tile * WORDS, s, lane, col % BK, BK, MODE, WIDE) * tl.load(s_ptr + row)
    elif LAYOUT == "rings":
        v = NUMBER(w_ptr + tile * WORDS, table_ptr, lane, col % BK, BK, MODE, WIDE) * tl.load(s_ptr + row)
    elif LAYOUT == "word":
        s = s_ptr
        if s_ptr is not None:
            s = tl.load(s_ptr + ((col // GROUP).to(tl.int64) * NPAD if GROUP else 0) + row)
        v = NUMBER(w_ptr + tile * WORDS, s, lane, col % BK, BK, MODE, WIDE)
    else:
        scale, low = scales_at(s_ptr, col // GROUP, row, NPAD, LAYOUT)
        v = (NUMBER(w_ptr + tile * WORDS, scale, lane, col % BK, BK, MODE, WIDE) + MIDDLE) * scale + low
    tl.store(y_ptr + index * y_row + col, v.to(y_ptr.dtype.element_ty), mask=seen)


def embed(ids: torch.Tensor, w: TritonWeight, dtype: torch.dtype, *,
          out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the rows ``W[ids]``.

    Args:
        ids: integers ``[m]`` from 0 to n − 1; the range isn't checked.
        w: a weight that isn't gated.
        dtype: the result's dtype. Codes are scaled in float32 and rounded to it once.
        out: ``[m, k]`` of that dtype, where the result is written; its rows may be further apart than k.

    Returns:
        ``[m, k]``.

    Raises:
        ValueError: a shape or dtype doesn't match, or the weight is gated.
    """
    shape = (ids.numel(), w.k)
    if ids.ndim != 1 or w.gated or ids.is_floating_point():
        raise ValueError(f"ids must be integers [m], not {ids.dtype} {list(ids.shape)}, and the weight must "
                         "not be gated")
    if out is not None and (out.shape != shape or out.dtype != dtype or out.stride(1) != 1):
        raise ValueError(f"out must be {list(shape)} in {dtype}, rows contiguous, "
                         f"not {list(out.shape)} {out.dtype}")
    y = torch.empty(shape, dtype=dtype, device=ids.device) if out is None else out
    if len(ids):
        embed_kernel[(len(ids), -(-w.k // BLOCK))](ids.contiguous(), w.words, w.scale, y, y.stride(0),
                                                  w.table, **constants(w))
    return y


def constants(w: TritonWeight) -> dict[str, object]:
    """Return the kernel's compile-time arguments."""
    return {"K": w.k, "BK": w.bk, "WORDS": w.words.shape[2], "TILES": w.words.shape[1], "GROUP": w.group,
            "NPAD": w.words.shape[0] * ROWS, "NUMBER": w.decoder.number, "MODE": w.mode,
            "WIDE": lane_columns(w.family), "BLOCK": BLOCK, "LAYOUT": w.layout, "MIDDLE":
            w.decoder.zero_level, "BITS": bits(w)}
