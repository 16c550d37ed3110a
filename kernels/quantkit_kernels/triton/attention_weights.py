"""Attention weights: the softmax over a sequence's slots, for eviction policies that rank slots by it.

There are two passes. The first computes the maximum and the sum of each split of a sequence, as
:func:`~quantkit_kernels.triton.decode_attention.decode_attention` leaves them; the second computes the
weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quantkit_kernels.triton.attention_arguments import CHANGING, check, constants_of, numbers, pointers
from quantkit_kernels.triton.cache import LayerPages, SequenceTables, StepTokens
from quantkit_kernels.triton.decode_attention import PIECE, SplitResults, run_pieces
from quantkit_kernels.triton.fragment import family_of
from quantkit_kernels.triton.kv_operands import key_dims, scores, vector_scores
from quantkit_kernels.triton.softmax import residual_page, scaled, visible, walk

JOIN = 16
"""Splits whose maxima and sums are read at a time."""


@triton.jit
def _of_group(s: tl.tensor, seen: tl.tensor, base: tl.tensor, total: tl.tensor, G: tl.constexpr,
              PEAKS: tl.constexpr) -> tl.tensor:
    """Turn scores ``[16, 64]`` into weights ``[64]``: the mean, or with PEAKS maximum, of the first G
    rows."""
    rg = tl.arange(0, 16)
    weights = tl.where((rg < G)[:, None] & seen[None, :], tl.exp2(s - base[:, None]) / total[:, None], 0.0)
    return tl.max(weights, 0) if PEAKS else tl.sum(weights, 0) / G


@triton.jit(do_not_specialize=[*CHANGING, "slots"])
def weights_kernel(q_ptr: tl.tensor, k_ptr: tl.tensor, k_scale_ptr: tl.tensor, k_shift_ptr: tl.tensor,
                   k_residual_ptr: tl.tensor, v_ptr: tl.tensor, v_scale_ptr: tl.tensor,
                   v_shift_ptr: tl.tensor, v_residual_ptr: tl.tensor, at_ptr: tl.tensor,
                   residual_at_ptr: tl.tensor, table_ptr: tl.tensor, residual_table_ptr: tl.tensor,
                   start_ptr: tl.tensor, length_ptr: tl.tensor, seen_ptr: tl.tensor, rows_ptr: tl.tensor,
                   m_ptr: tl.tensor, l_ptr: tl.tensor, w_ptr: tl.tensor, factor: tl.tensor, cap: tl.tensor,
                   window: tl.tensor, limit: tl.tensor, sinks: tl.tensor, residual_length: tl.tensor,
                   first: tl.tensor, layer: tl.tensor, layers: tl.tensor, width: tl.tensor,
                   residual_width: tl.tensor, q_step: tl.tensor, splits: tl.tensor, slots: tl.tensor,
                   HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, KK: tl.constexpr,
                   KB: tl.constexpr, KC: tl.constexpr, VK: tl.constexpr, VB: tl.constexpr,
                   HAS_RESIDUAL: tl.constexpr, LIMITED: tl.constexpr, PLACED: tl.constexpr,
                   CAPPED: tl.constexpr, ASM: tl.constexpr, PEAKS: tl.constexpr, COUNT: tl.constexpr,
                   JOIN: tl.constexpr, STAGES: tl.constexpr) -> None:
    """Compute the weights of one split of one key head for one token.

    w is float32 ``[N, HKV, slots]`` and written where a page is read; m and l are as in
    :func:`~quantkit_kernels.triton.decode_attention.split_kv_kernel`.
    """
    token, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    sequence, place = tl.load(rows_ptr + 2 * token).to(tl.int64), tl.load(rows_ptr + 2 * token + 1)
    if sequence < 0:
        return
    row = (sequence * layers + layer) * HKV + head
    length = tl.load(length_ptr + row) + place + 1
    query = tl.load(seen_ptr + sequence) + place
    begin = split * COUNT
    end = tl.minimum((length + 63) // 64, begin + COUNT)
    if end <= begin:
        return
    fixed, coded, low, rest = walk(begin, end, length, query, window, limit, sinks, residual_length, first,
                                   HAS_RESIDUAL, LIMITED, PLACED)
    rg, rd, rt, rj = tl.arange(0, 16), tl.arange(0, DP), tl.arange(0, 64), tl.arange(0, JOIN)
    used = (length + 64 * COUNT - 1) // (64 * COUNT)
    m_ptr += (token * HKV + head) * splits * G + rg[:, None]
    l_ptr += (token * HKV + head) * splits * G + rg[:, None]
    maxima = tl.full([16, JOIN], float("-inf"), tl.float32)
    for i in range(0, used, JOIN):
        inside = (rg < G)[:, None] & (i + rj < used)[None, :]
        maxima = tl.maximum(maxima, tl.load(m_ptr + (i + rj)[None, :] * G, mask=inside, other=float("-inf")))
    base = tl.max(maxima, 1)
    base = tl.where(base == float("-inf"), 0.0, base)
    sums = tl.full([16, JOIN], 0.0, tl.float32)
    for i in range(0, used, JOIN):
        inside = (rg < G)[:, None] & (i + rj < used)[None, :]
        m = tl.load(m_ptr + (i + rj)[None, :] * G, mask=inside, other=float("-inf"))
        sums += tl.exp2(m - base[:, None]) * tl.load(l_ptr + (i + rj)[None, :] * G, mask=inside, other=0.0)
    total = tl.sum(sums, 1)
    total = tl.where(total > 0, total, 1.0)
    w_ptr += (token * HKV + head) * slots
    q_ptr += token * q_step + (head * G + rg)[:, None] * D
    dims = key_dims(KK, KB, DP)
    q = tl.load(q_ptr + dims[None, :], mask=(rg < G)[:, None] & (dims < D)[None, :], other=0.0)
    for i in tl.range(tl.maximum(low, fixed), tl.minimum(end, coded), num_stages=STAGES):
        page = tl.load(table_ptr + row * width + i - fixed).to(tl.int64)
        slot = i * 64 + rt
        s = scores(q, k_ptr, k_scale_ptr, k_shift_ptr, page, KK, KB, KC, D, DP, ASM)
        s = scaled(s, factor, cap, CAPPED)
        seen = slot < length
        if LIMITED:
            position = slot
            if PLACED:
                position = tl.load(at_ptr + page * 64 + rt)
            seen &= visible(position, query, window, limit, sinks)
        tl.store(w_ptr + slot, _of_group(s, seen, base, total, G, PEAKS), mask=slot < length)
    if HAS_RESIDUAL:
        plain = tl.load(q_ptr + rd[None, :], mask=(rg < G)[:, None] & (rd < D)[None, :], other=0.0)
        start = tl.load(start_ptr + row) // 64
        early = tl.maximum(tl.minimum(end, fixed) - low, 0)
        for j in range(early + tl.maximum(end - rest, 0)):
            i, page = residual_page(residual_table_ptr + row * residual_width, j, early, low, rest, fixed,
                                    start)
            slot = i * 64 + rt
            s = scaled(vector_scores(plain, k_residual_ptr, page, D, DP), factor, cap, CAPPED)
            seen = slot < length
            if LIMITED:
                position = slot
                if PLACED:
                    position = tl.load(residual_at_ptr + page * 64 + rt)
                seen &= visible(position, query, window, limit, sinks)
            tl.store(w_ptr + slot, _of_group(s, seen, base, total, G, PEAKS), mask=slot < length)


def options(family: str) -> dict[str, int]:
    """Return the launch options of :func:`weights_kernel`."""
    if family == "cdna":
        return {"STAGES": 1, "num_warps": 2}
    # without a limit ptxas of CUDA 12 trades registers for occupancy on Hopper, and spills
    return {"STAGES": 5, "num_warps": 4} | ({"maxnreg": 128} if family == "hopper" else {})


def attention_weights(q: torch.Tensor, pages: LayerPages, tables: SequenceTables, step: StepTokens,
                      layer: int, *, scale: float, window: int | None = None, limit: int | None = None,
                      sinks: int = 0, softcap: float | None = None, peaks: bool = False,
                      splits: SplitResults | None = None) -> torch.Tensor:
    """Return how much each token attends to each slot, averaged over the query heads that share a key head.

    Args:
        peaks: take the maximum over those heads instead of the mean.
        splits: the ``splits`` of a :func:`~quantkit_kernels.triton.decode_attention.decode_attention` call
            for the same queries; ``None``: they are computed first.
        q, pages, tables, step, layer, scale, window, limit, sinks, softcap: as for ``decode_attention``. A
            token's place may be negative: then its queries are of an earlier step, and all slots that were
            stored since must still be present.

    Returns:
        float32 ``[N, Hkv, longest]``, 0 where a slot isn't visible.

    Raises:
        ValueError: no kernel reads these layouts, or shapes or dtypes don't match.
    """
    check(q, pages, tables, step, layer)
    hkv = tables.pages.shape[2]
    out = torch.zeros(q.shape[0], hkv, step.longest, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out
    if splits is None:
        splits = SplitResults.of(q, hkv, step.longest, values=False)
        run_pieces(splits, q, pages, tables, step, layer, scale, window, limit, sinks, softcap, values=False)
    count = splits.m.shape[2]
    weights_kernel[(len(q), hkv, count)](
        **pointers(q, pages, tables, step), m_ptr=splits.m, l_ptr=splits.l, w_ptr=out,
        **numbers(q, tables, layer, scale, window, limit, sinks, softcap), splits=count, slots=step.longest,
        **constants_of(q, pages, tables, window, limit, softcap), PEAKS=peaks, COUNT=PIECE, JOIN=JOIN,
        **options(family_of(q.device)))
    return out
