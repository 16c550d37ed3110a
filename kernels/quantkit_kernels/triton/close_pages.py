"""Encodes pages of the residual that have left the residual window.

A query at slot s reads slots before ``border(s + 1)`` as codes. So the token that is stored in slot s pushes
at most one page of a head out of the window, and the pages to encode in a step follow from its tokens' slots.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from quantkit_kernels.triton.cache import PAGE, LayerPages, SequenceTables, StepTokens
from quantkit_kernels.triton.kv_encode import pointers, store_page
from quantkit_kernels.triton.rope_store import check_tables

FEW = 256
"""Up to this many tokens, each token has its own programs; of more tokens, most don't complete a page."""


@triton.jit(do_not_specialize=["n", "layer", "width", "residual_width", "residual_length", "first"])
def close_pages_kernel(kc_ptr: tl.tensor, ks_ptr: tl.tensor, kl_ptr: tl.tensor, vc_ptr: tl.tensor,
                       vs_ptr: tl.tensor, vl_ptr: tl.tensor, kw_ptr: tl.tensor, vw_ptr: tl.tensor,
                       at_ptr: tl.tensor, atw_ptr: tl.tensor, rows_ptr: tl.tensor, table_ptr: tl.tensor,
                       residual_ptr: tl.tensor, length_ptr: tl.tensor, start_ptr: tl.tensor, n: tl.tensor,
                       layer: tl.tensor, width: tl.tensor, residual_width: tl.tensor,
                       residual_length: tl.tensor, first: tl.tensor, LAYERS: tl.constexpr, HKV: tl.constexpr,
                       D: tl.constexpr, DP: tl.constexpr, BT: tl.constexpr, KIND: tl.constexpr,
                       BITS: tl.constexpr, CENTERED: tl.constexpr, VKIND: tl.constexpr, VBITS: tl.constexpr,
                       VCENTERED: tl.constexpr, PLACED: tl.constexpr) -> None:
    """Encode the pages that BT tokens complete in one head: keys (program_id(2) = 0) or values.

    ``kc, ks, kl, kw``: codes, scale, shift and waiting vectors of keys, ``v*`` of values.
    """
    head = tl.program_id(1)
    rt = tl.program_id(0) * BT + tl.arange(0, BT)
    row = tl.load(rows_ptr + rt * 2, mask=rt < n, other=-1).to(tl.int64)
    place = tl.load(rows_ptr + rt * 2 + 1, mask=rt < n, other=0)
    heads = (row * LAYERS + layer) * HKV + head
    end = tl.load(length_ptr + heads, mask=row >= 0, other=0) + place + 1 - residual_length
    ends = (row >= 0) & (end % 64 == 0) & (end > first)
    rp, rd = tl.arange(0, 64), tl.arange(0, DP)
    inside = (rp >= 0)[:, None] & (rd < D)[None, :]
    token = tl.min(tl.where(ends, rt, n))
    while token < n:
        table_row = tl.sum(tl.where(rt == token, heads, 0))
        begin = tl.sum(tl.where(rt == token, end, 0)) - 64
        index = begin - tl.load(start_ptr + table_row) + first
        source = tl.load(residual_ptr + table_row * residual_width + index // 64).to(tl.int64)
        target = tl.load(table_ptr + table_row * width + (begin - first) // 64).to(tl.int64)
        cells = source * (64 * D) + rp[:, None] * D + rd[None, :]
        if tl.program_id(2) == 0:
            x = tl.load(kw_ptr + cells, mask=inside, other=0.0).to(tl.float32)
            store_page(x, kc_ptr, ks_ptr, kl_ptr, target, D, KIND, BITS, CENTERED)
            if PLACED:
                tl.store(at_ptr + target * 64 + rp, tl.load(atw_ptr + source * 64 + rp))
        else:
            x = tl.load(vw_ptr + cells, mask=inside, other=0.0).to(tl.float32)
            store_page(x, vc_ptr, vs_ptr, vl_ptr, target, D, VKIND, VBITS, VCENTERED)
        token = tl.min(tl.where(ends & (rt > token), rt, n))


def constants(n: int, kv_heads: int, dim: int, pages: LayerPages) -> dict[str, Any]:
    """Return the compile-time arguments, except LAYERS, and launch options for n tokens."""
    k, v = pages.k.coding, pages.v.coding
    padded = triton.next_power_of_2(dim)
    return {"HKV": kv_heads, "D": dim, "DP": padded, "BT": 1 if n <= FEW else 16, "KIND": k.kind,
            "BITS": k.bits, "CENTERED": k.centered, "VKIND": v.kind, "VBITS": v.bits,
            "VCENTERED": v.centered, "PLACED": pages.positions is not None, "enable_fp_fusion": False,
            "num_warps": max(1, min(8, PAGE * padded // 1024))}


def close_pages(pages: LayerPages, tables: SequenceTables, step: StepTokens, layer: int) -> None:
    """Encode the pages that the step's last queries read as codes, after :func:`~.rope_store.rope_store`.

    In each sequence and head those are the pages in ``[border(lengths), border(lengths + tokens))``. The
    residual vectors stay in place, because earlier queries of the step still read them.

    Args:
        pages: the layer's pages; codes, and positions if slots have them, are written.
        tables, step: as for ``rope_store``.
        layer: index in the tables.

    Raises:
        ValueError: the layer has no residual, or the tables and pages don't match.
    """
    if (pages.k.residual is None or pages.v.residual is None or tables.residual is None
            or tables.starts is None):
        raise ValueError("only a layer with residual vectors can encode them later")

    n, hkv = len(step.rows), tables.lengths.shape[2]
    check_tables(pages, tables, hkv)
    if n == 0:
        return
    common = constants(n, hkv, pages.k.residual.shape[2], pages)
    places: tuple[torch.Tensor, torch.Tensor] = (step.rows, step.rows)
    if pages.positions is not None and pages.residual_positions is not None:
        places = pages.positions, pages.residual_positions
    close_pages_kernel[(-(-n // common["BT"]), hkv, 2)](
        *pointers(pages.k), *pointers(pages.v), pages.k.residual, pages.v.residual, *places, step.rows,
        tables.pages, tables.residual, tables.lengths, tables.starts, n, layer, tables.pages.shape[3],
        tables.residual.shape[3], tables.residual_length, tables.first, LAYERS=tables.pages.shape[1],
        **common)
