"""Attention of a prompt's tokens over paged keys and values, plain or coded.

Neighboring tokens of a sequence, and the query heads that share a key head, are the rows of one matrix
product; pages are walked as in :mod:`~quantkit_kernels.triton.decode_attention`: codes, then vectors that
wait, each by slot (https://arxiv.org/abs/2307.08691). What a row doesn't see adds nothing, to the bit: a
token's result doesn't depend on where a prompt was cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from quantkit_kernels.triton.attention_arguments import CHANGING, check, constants_of, numbers, pointers
from quantkit_kernels.triton.cache import (
    HADAMARD,
    PLAIN,
    LayerPages,
    SequenceTables,
    SideLayout,
    StepTokens,
    border,
)
from quantkit_kernels.triton.fragment import family_of
from quantkit_kernels.triton.kv_operands import (
    add_values,
    add_vectors,
    key_dims,
    natural,
    scores,
    vector_scores,
)
from quantkit_kernels.triton.softmax import at_or_after, residual_page, scaled, spans, update, visible

ROWS = 128
"""Of a tile: tokens times query heads that share a key head. Where registers are short, a part at a time."""


@triton.jit(do_not_specialize=CHANGING)
def tile_kernel(q_ptr: tl.tensor, k_ptr: tl.tensor, k_scale_ptr: tl.tensor, k_shift_ptr: tl.tensor,
                k_residual_ptr: tl.tensor, v_ptr: tl.tensor, v_scale_ptr: tl.tensor, v_shift_ptr: tl.tensor,
                v_residual_ptr: tl.tensor, at_ptr: tl.tensor, residual_at_ptr: tl.tensor,
                table_ptr: tl.tensor, residual_table_ptr: tl.tensor, start_ptr: tl.tensor,
                length_ptr: tl.tensor, seen_ptr: tl.tensor, rows_ptr: tl.tensor, tile_ptr: tl.tensor,
                y_ptr: tl.tensor, factor: tl.tensor, cap: tl.tensor, window: tl.tensor, limit: tl.tensor,
                sinks: tl.tensor, residual_length: tl.tensor, first: tl.tensor, layer: tl.tensor,
                layers: tl.tensor, width: tl.tensor, residual_width: tl.tensor, q_step: tl.tensor,
                y_step: tl.tensor, sink_ptr: tl.tensor,
                HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, KK: tl.constexpr,
                KB: tl.constexpr, KC: tl.constexpr, VK: tl.constexpr, VB: tl.constexpr,
                HAS_RESIDUAL: tl.constexpr, LIMITED: tl.constexpr, PLACED: tl.constexpr, CAPPED: tl.constexpr,
                ASM: tl.constexpr, M: tl.constexpr, GP: tl.constexpr, STAGES: tl.constexpr) -> None:
    """A tile's tokens by one key head: y ``[N, HKV * G, D]``; tile int32 ``[n_tiles, 3]``; sink float32
    ``[HKV * G]``, in powers of two, or ``None``."""
    # the longest come first, so that none of them is left over at the end
    head, part = tl.program_id(0), tl.program_id(1) * (M // GP)
    tile = tl.num_programs(2) - 1 - tl.program_id(2)
    start_token = tl.load(tile_ptr + 3 * tile).to(tl.int64) + part
    count = tl.minimum(tl.load(tile_ptr + 3 * tile + 1) - part, M // GP)
    sequence = tl.load(tile_ptr + 3 * tile + 2).to(tl.int64)
    if count <= 0:
        return
    rm, rd, rt = tl.arange(0, M), tl.arange(0, DP), tl.arange(0, 64)
    rows = (rm // GP < count) & (rm % GP < G)
    to = (head * G + rm % GP)[:, None] * D
    y_ptr += (start_token + rm // GP)[:, None] * y_step + to + rd[None, :]
    if sequence < 0:
        tl.store(y_ptr, tl.zeros([M, DP], y_ptr.dtype.element_ty), mask=rows[:, None] & (rd < D)[None, :])
        return
    row = (sequence * layers + layer) * HKV + head
    place = tl.load(rows_ptr + 2 * start_token + 1)
    query = tl.load(seen_ptr + sequence) + place
    shortest = tl.load(length_ptr + row) + place + 1
    lengths = shortest + tl.minimum(rm // GP, count - 1)
    longest = shortest + count - 1
    end = tl.maximum(longest + 63, 0) // 64
    fixed, coded, residual = 0, end, end
    borders = lengths
    if HAS_RESIDUAL:
        borders = border(lengths, residual_length, first)
        fixed, coded = first // 64, border(longest, residual_length, first) // 64
        residual = border(shortest, residual_length, first) // 64
    a, b, c, low = 0, 0, 0, 0
    if LIMITED and not PLACED:
        a, b, c = spans(query, window, limit, sinks)
        low, residual = at_or_after(0, a, b, c), at_or_after(residual, a, b, c)
    dtype = q_ptr.dtype.element_ty
    q_ptr += (start_token + rm // GP)[:, None] * q_step + to
    dims = key_dims(KK, KB, DP)
    q = tl.load(q_ptr + dims[None, :], mask=rows[:, None] & (dims < D)[None, :], other=0.0)
    queries = query + rm // GP
    acc = tl.full([M, DP], 0.0, tl.float32)
    maximum = tl.full([M], float("-inf"), tl.float32)
    total = tl.full([M], 0.0, tl.float32)
    # sinks, and what is in the window
    begin, after = tl.maximum(a, fixed), tl.maximum(c, fixed)
    early = tl.maximum(tl.minimum(b, tl.minimum(end, coded)) - begin, 0)
    for j in tl.range(0, early + tl.maximum(tl.minimum(end, coded) - after, 0), num_stages=STAGES):
        i = tl.where(j < early, begin + j, after + j - early)
        page = tl.load(table_ptr + row * width + i - fixed).to(tl.int64)
        at = i * 64 + rt
        valid = at < longest
        s = scores(q, k_ptr, k_scale_ptr, k_shift_ptr, page, KK, KB, KC, D, DP, ASM)
        s = scaled(s, factor, cap, CAPPED)
        seen = at[None, :] < borders[:, None]
        if LIMITED:
            if PLACED:
                at = tl.load(at_ptr + page * 64 + rt)
            seen &= visible(at[None, :], queries[:, None], window, limit, sinks)
        s = tl.where(seen, s, float("-inf"))
        p, shrink, maximum, total = update(s, maximum, total)
        acc = add_values(acc * shrink[:, None], p, v_ptr, v_scale_ptr, v_shift_ptr, page, valid, VK, VB, D,
                         DP, dtype, ASM)
    if HAS_RESIDUAL:
        plain = tl.load(q_ptr + rd[None, :], mask=rows[:, None] & (rd < D)[None, :], other=0.0)
        start = tl.load(start_ptr + row) // 64
        early = tl.maximum(tl.minimum(end, fixed) - low, 0)
        for j in tl.range(0, early + tl.maximum(end - residual, 0), num_stages=STAGES):
            i, page = residual_page(residual_table_ptr + row * residual_width, j, early, low, residual, fixed,
                                    start)
            at = i * 64 + rt
            valid = at < longest
            s = scaled(vector_scores(plain, k_residual_ptr, page, D, DP), factor, cap, CAPPED)
            seen = (at < first)[None, :] | (at[None, :] >= borders[:, None])
            seen &= at[None, :] < lengths[:, None]
            if LIMITED:
                if PLACED:
                    at = tl.load(residual_at_ptr + page * 64 + rt)
                seen &= visible(at[None, :], queries[:, None], window, limit, sinks)
            s = tl.where(seen, s, float("-inf"))
            p, shrink, maximum, total = update(s, maximum, total)
            acc = add_vectors(acc * shrink[:, None], p, v_residual_ptr, page, valid, VK, VB, D, DP, dtype)
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + head * G + rm % GP, mask=rm % GP < G, other=0.0)
        highest = tl.maximum(maximum, sink)
        shrink = tl.exp2(maximum - highest)
        acc, total = acc * shrink[:, None], total * shrink + tl.exp2(sink - highest)
    acc = natural(acc, VK, VB, dtype) / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(y_ptr, acc.to(y_ptr.dtype.element_ty), mask=rows[:, None] & (rd < D)[None, :])


def options(family: str, k: SideLayout, v: SideLayout, d: int) -> dict[str, int]:
    """How :func:`tile_kernel` is launched, and rows of a product."""
    rows, low = ROWS, min(k.bits, v.bits) < 8
    if d > 128:
        rows = (16 if family == "cdna" else 64 if family == "blackwell" else 32) if low else 64
        if family == "ampere" or (family == "hopper" and k.kind != PLAIN):
            rows = 16 if family == "ampere" and k.kind == HADAMARD else 32
    elif family == "ampere":
        rows = 32 if low else 64
    if family == "cdna":
        return {"M": rows, "STAGES": 1, "num_warps": 4}
    # without a bound ptxas gives up registers for occupancy there, and spills
    return {"M": rows, "STAGES": 3, "num_warps": 8} | ({"maxnreg": 255} if family == "ampere" else {})


def tokens(group: int) -> int:
    """The most tokens of a tile where ``group`` query heads share a key head."""
    return ROWS // triton.next_power_of_2(group)


def tiles_of(rows: Sequence[int], counts: Sequence[int], group: int) -> list[tuple[int, int, int]]:
    """The tiles of a step whose sequences have these numbers of tokens, one after another.

    Args:
        rows: the numbers of the R sequences of :class:`~quantkit_kernels.triton.cache.SequenceTables`.
        counts: tokens of each.
        group: query heads that share a key head.
    """
    tiles, begin = [], 0
    for row, count in zip(rows, counts, strict=True):
        tiles += [(begin + at, min(tokens(group), count - at), row) for at in range(0, count, tokens(group))]
        begin += count
    return tiles


def prefill_attention(q: torch.Tensor, pages: LayerPages, tables: SequenceTables, step: StepTokens,
                      layer: int, tiles: torch.Tensor, *, scale: float, window: int | None = None,
                      limit: int | None = None, sinks: int = 0, softcap: float | None = None,
                      sink_scores: torch.Tensor | None = None,
                      out: torch.Tensor | None = None) -> torch.Tensor:
    """``softmax(scale · q kᵀ) v`` of each token over what its heads hold up to itself.

    Args:
        tiles: int32 ``[n_tiles, 3]``: first token, index into q; number of tokens, at most :func:`tokens`, 0:
            nothing to do; their sequence, one of R, or −1: they get zeros. Tokens of a tile follow one
            another in their sequence. A token that is in no tile gets nothing.
        q, pages, tables, step, layer, scale, window, limit, sinks, softcap, sink_scores, out: see
            :func:`~quantkit_kernels.triton.decode_attention.decode_attention`.

    Returns:
        ``[N, H, D]``; of turned values still turned.

    Raises:
        ValueError: shapes, dtypes or codings don't fit.
    """
    check(q, pages, tables, step, layer)
    n, h, d = q.shape
    if out is None:
        out = torch.empty(n, h, d, dtype=q.dtype, device=q.device)
    if (out.shape != q.shape or out.dtype != q.dtype or out.stride()[1:] != (d, 1)
            or tiles.dtype != torch.int32 or tiles.shape[1:] != (3,) or not tiles.is_contiguous()):
        raise ValueError("q, tiles and out don't fit together")
    if n == 0 or len(tiles) == 0:
        return out
    hkv = tables.pages.shape[2]
    common = constants_of(q, pages, tables, window, limit, softcap)
    launch = options(family_of(q.device), pages.k.coding, pages.v.coding, d)
    tile_kernel[(hkv, ROWS // launch["M"], len(tiles))](
        **pointers(q, pages, tables, step), tile_ptr=tiles, y_ptr=out,
        **numbers(q, tables, layer, scale, window, limit, sinks, softcap), y_step=out.stride(0),
        sink_ptr=sink_scores, **common, GP=triton.next_power_of_2(h // hkv), **launch)
    return out
