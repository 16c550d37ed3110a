"""Where queries look: softmax weights over the slots, for policies that decide by them which slots stay.

Two passes: maxima and sums of each piece of a sequence, as
:func:`~quantkit_kernels.triton.decode_attention.decode_attention` leaves them, then the weights themselves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quantkit_kernels.triton.attention_arguments import CHANGING, check, constants_of, numbers, pointers
from quantkit_kernels.triton.cache import LayerPages, SequenceTables, StepTokens
from quantkit_kernels.triton.decode_attention import JOIN, PIECE, SplitResults, run_pieces
from quantkit_kernels.triton.fragment import family_of
from quantkit_kernels.triton.kv_operands import key_dims, scores, vector_scores
from quantkit_kernels.triton.softmax import residual_page, scaled, visible, walk


@triton.jit
def _of_group(s: tl.tensor, seen: tl.tensor, base: tl.tensor, total: tl.tensor, G: tl.constexpr,
              PEAKS: tl.constexpr) -> tl.tensor:
    """Scores ``[16, 64]`` → weights ``[64]``: mean or maximum over the first G rows."""
    rg = tl.arange(0, 16)
    weights = tl.where((rg < G)[:, None] & seen[None, :], tl.exp2(s - base[:, None]) / total[:, None], 0.0)
    return tl.max(weights, 0) if PEAKS else tl.sum(weights, 0) / G


@triton.jit(do_not_specialize=[*CHANGING, "slots"])
def weights_kernel(q_ptr: tl.tensor, k_ptr: tl.tensor, k_scale_ptr: tl.tensor, k_shift_ptr: tl.tensor,
                   k_wait_ptr: tl.tensor, v_ptr: tl.tensor, v_scale_ptr: tl.tensor, v_shift_ptr: tl.tensor,
                   v_wait_ptr: tl.tensor, at_ptr: tl.tensor, wait_at_ptr: tl.tensor, table_ptr: tl.tensor,
                   residual_table_ptr: tl.tensor, start_ptr: tl.tensor, length_ptr: tl.tensor,
                   seen_ptr: tl.tensor, rows_ptr: tl.tensor, m_ptr: tl.tensor, l_ptr: tl.tensor,
                   w_ptr: tl.tensor, factor: tl.tensor, cap: tl.tensor, window: tl.tensor, limit: tl.tensor,
                   sinks: tl.tensor, residual_length: tl.tensor, first: tl.tensor, layer: tl.tensor,
                   layers: tl.tensor, width: tl.tensor, residual_width: tl.tensor, q_step: tl.tensor,
                   pieces: tl.tensor, slots: tl.tensor, HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
                   DP: tl.constexpr, KK: tl.constexpr, KB: tl.constexpr, KC: tl.constexpr, VK: tl.constexpr,
                   VB: tl.constexpr, HAS_RESIDUAL: tl.constexpr, LIMITED: tl.constexpr, PLACED: tl.constexpr,
                   CAPPED: tl.constexpr, ASM: tl.constexpr, PEAKS: tl.constexpr, COUNT: tl.constexpr,
                   JOIN: tl.constexpr, STAGES: tl.constexpr) -> None:
    """One piece of one key head of one token: w float32 ``[N, HKV, slots]``, written where a page is read; m
    and l as in :func:`~quantkit_kernels.triton.decode_attention.split_kv_kernel`."""
    token, head, piece = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    sequence, place = tl.load(rows_ptr + 2 * token).to(tl.int64), tl.load(rows_ptr + 2 * token + 1)
    if sequence < 0:
        return
    row = (sequence * layers + layer) * HKV + head
    length = tl.load(length_ptr + row) + place + 1
    query = tl.load(seen_ptr + sequence) + place
    begin = piece * COUNT
    end = tl.minimum((length + 63) // 64, begin + COUNT)
    if end <= begin:
        return
    fixed, coded, low, rest = walk(begin, end, length, query, window, limit, sinks, residual_length, first,
                                   HAS_RESIDUAL, LIMITED, PLACED)
    rg, rd, rt, rj = tl.arange(0, 16), tl.arange(0, DP), tl.arange(0, 64), tl.arange(0, JOIN)
    used = (length + 64 * COUNT - 1) // (64 * COUNT)
    m_ptr += (token * HKV + head) * pieces * G + rg[:, None]
    l_ptr += (token * HKV + head) * pieces * G + rg[:, None]
    most = tl.full([16, JOIN], float("-inf"), tl.float32)
    for i in range(0, used, JOIN):
        there = (rg < G)[:, None] & (i + rj < used)[None, :]
        most = tl.maximum(most, tl.load(m_ptr + (i + rj)[None, :] * G, mask=there, other=float("-inf")))
    base = tl.max(most, 1)
    base = tl.where(base == float("-inf"), 0.0, base)
    sums = tl.full([16, JOIN], 0.0, tl.float32)
    for i in range(0, used, JOIN):
        there = (rg < G)[:, None] & (i + rj < used)[None, :]
        m = tl.load(m_ptr + (i + rj)[None, :] * G, mask=there, other=float("-inf"))
        sums += tl.exp2(m - base[:, None]) * tl.load(l_ptr + (i + rj)[None, :] * G, mask=there, other=0.0)
    total = tl.sum(sums, 1)
    total = tl.where(total > 0, total, 1.0)
    w_ptr += (token * HKV + head) * slots
    q_ptr += token * q_step + (head * G + rg)[:, None] * D
    dims = key_dims(KK, KB, DP)
    q = tl.load(q_ptr + dims[None, :], mask=(rg < G)[:, None] & (dims < D)[None, :], other=0.0)
    for i in tl.range(tl.maximum(low, fixed), tl.minimum(end, coded), num_stages=STAGES):
        page = tl.load(table_ptr + row * width + i - fixed).to(tl.int64)
        at = i * 64 + rt
        s = scores(q, k_ptr, k_scale_ptr, k_shift_ptr, page, KK, KB, KC, D, DP, ASM)
        s = scaled(s, factor, cap, CAPPED)
        seen = at < length
        if LIMITED:
            where = at
            if PLACED:
                where = tl.load(at_ptr + page * 64 + rt)
            seen &= visible(where, query, window, limit, sinks)
        tl.store(w_ptr + at, _of_group(s, seen, base, total, G, PEAKS), mask=at < length)
    if HAS_RESIDUAL:
        plain = tl.load(q_ptr + rd[None, :], mask=(rg < G)[:, None] & (rd < D)[None, :], other=0.0)
        start = tl.load(start_ptr + row) // 64
        early = tl.maximum(tl.minimum(end, fixed) - low, 0)
        for j in range(early + tl.maximum(end - rest, 0)):
            i, page = residual_page(residual_table_ptr + row * residual_width, j, early, low, rest, fixed,
                                    start)
            at = i * 64 + rt
            s = scaled(vector_scores(plain, k_wait_ptr, page, D, DP), factor, cap, CAPPED)
            seen = at < length
            if LIMITED:
                where = at
                if PLACED:
                    where = tl.load(wait_at_ptr + page * 64 + rt)
                seen &= visible(where, query, window, limit, sinks)
            tl.store(w_ptr + at, _of_group(s, seen, base, total, G, PEAKS), mask=at < length)


def options(family: str) -> dict[str, int]:
    """How :func:`weights_kernel` is launched."""
    if family == "cdna":
        return {"STAGES": 1, "num_warps": 2}
    # without a bound ptxas of CUDA 12 gives up registers for occupancy on Hopper, and spills
    return {"STAGES": 5, "num_warps": 4} | ({"maxnreg": 128} if family == "hopper" else {})


def attention_weights(q: torch.Tensor, pages: LayerPages, tables: SequenceTables, step: StepTokens,
                      layer: int, *, scale: float, window: int | None = None, limit: int | None = None,
                      sinks: int = 0, softcap: float | None = None, peaks: bool = False,
                      pieces: SplitResults | None = None) -> torch.Tensor:
    """Attention of each token's queries to the slots, their mean over the heads that share a key head.

    Args:
        peaks: the largest instead of the mean.
        pieces: what a call of :func:`~quantkit_kernels.triton.decode_attention.decode_attention` for the same
            queries left; ``None``: that is worked out first.
        q, pages, tables, step, layer, scale, window, limit, sinks, softcap: as there. A token's place may be
            negative: queries of an earlier step, while the slots that came since are still all there.

    Returns:
        float32 ``[N, Hkv, longest]``, 0 where a slot isn't seen.

    Raises:
        ValueError: shapes, dtypes or codings don't fit.
    """
    check(q, pages, tables, step, layer)
    hkv = tables.pages.shape[2]
    out = torch.zeros(q.shape[0], hkv, step.longest, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out
    if pieces is None:
        pieces = SplitResults.of(q, hkv, step.longest, values=False)
        run_pieces(pieces, q, pages, tables, step, layer, scale, window, limit, sinks, softcap, values=False)
    count = pieces.m.shape[2]
    weights_kernel[(len(q), hkv, count)](
        **pointers(q, pages, tables, step), m_ptr=pieces.m, l_ptr=pieces.l, w_ptr=out,
        **numbers(q, tables, layer, scale, window, limit, sinks, softcap), pieces=count, slots=step.longest,
        **constants_of(q, pages, tables, window, limit, softcap), PEAKS=peaks, COUNT=PIECE, JOIN=JOIN,
        **options(family_of(q.device)))
    return out
