"""Decoding attention over paged keys and values, unquantized or quantized: one query token at a time.

A page holds 64 slots of one key head; every sequence has a page table for each of its key heads, so
that heads may hold different positions. https://arxiv.org/abs/2309.06180

The query heads that share a key head are the 16 rows of one matrix product. A sequence is divided into splits
of a fixed number of pages, whatever else is in the batch. They are joined by their log-sum-exp
(https://crfm.stanford.edu/2023/10/12/flashdecoding.html): where a step has few splits by the last program of
a head, else by a second kernel with more programs. Which one it is depends on the longest sequence, so both
do the same, operation by operation: splits i, i + 4, i + 8, … are added one after another, then those four
sums in pairs. So a sequence's result doesn't depend on the others. Within a split codes are read first, then
residual vectors, both in the order of slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from quantkit_kernels.triton.arrivals import COUNTERS, counters, is_last
from quantkit_kernels.triton.attention_arguments import CHANGING, check, constants_of, numbers, pointers
from quantkit_kernels.triton.cache import HADAMARD, PLAIN, LayerPages, SequenceTables, SideLayout, StepTokens
from quantkit_kernels.triton.dependent import let_next_begin, starts
from quantkit_kernels.triton.fragment import family_of
from quantkit_kernels.triton.kv_operands import (
    add_values,
    add_vectors,
    key_dims,
    natural,
    scores,
    vector_scores,
)
from quantkit_kernels.triton.softmax import residual_page, scaled, update, visible, walk

PIECE = 8
"""Pages of a split, which one program reads: 512 slots."""
WIDTH = 64
"""Dimensions that a program of the second kernel, a single warp, joins."""
FEW = 8
"""Splits of a step up to which the last program of a head joins them, if the head's queries have no more
numbers than :data:`LARGEST`: for more a single program takes too long."""
LARGEST = 1024
AT_ONCE = tl.constexpr(512)
"""Numbers that it joins together: all their splits are on their way at once, and need registers."""
LANES = tl.constexpr(4)
"""Sums that splits are added to in turn."""


@triton.jit
def _add_split(acc: tl.tensor, total: tl.tensor, o: tl.tensor, m: tl.tensor, l: tl.tensor,  # noqa: E741
               base: tl.tensor) -> tl.tensor:
    """Add splits' ``o [rows, dims]`` and ``l [rows]``. Where nothing was attended to o may be anything."""
    weight = tl.exp2(m - base)
    acc = tl.fma(tl.where((weight > 0)[:, None], o, 0.0), weight[:, None], acc)
    return acc, tl.fma(weight, l, total)


@triton.jit
def _sum_of_lanes(x: tl.tensor) -> tl.tensor:
    """``[LANES, W]`` → ``[W]``, in the order of :func:`_join`."""
    W: tl.constexpr = x.shape[1]
    a, b = tl.split(x.reshape(2, 2, W).trans(0, 2, 1))
    a, b = tl.split((a + b).trans(1, 0))
    return a + b


@triton.jit
def _quotient(acc: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Zeros where nothing was attended to. Which zero acc is depends on how many others were added."""
    return tl.where((total > 0) & (acc != 0), acc / tl.where(total > 0, total, 1.0), 0.0)


@triton.jit
def _lane(o_ptr: tl.tensor, m_ptr: tl.tensor, l_ptr: tl.tensor, base: tl.tensor, rg: tl.tensor,
          used: tl.tensor, LANE: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
          FEW: tl.constexpr) -> tl.tensor:
    """One of the sums of :func:`_join`, ``[heads, DP]``, and of l, ``[heads]``."""
    rd = tl.arange(0, DP)
    acc, total = tl.zeros([rg.shape[0], DP], tl.float32), tl.zeros([rg.shape[0]], tl.float32)
    for i in tl.static_range(LANE, FEW, LANES):
        inside = (rg < G) & (i < used)
        m = tl.load(m_ptr + i * G + rg, mask=inside, other=float("-inf"))
        l = tl.load(l_ptr + i * G + rg, mask=inside, other=0.0)  # noqa: E741
        o = tl.load(o_ptr + (i * G + rg)[:, None] * D + rd[None, :],
                    mask=inside[:, None] & (rd < D)[None, :], other=0.0)
        acc, total = _add_split(acc, total, o, m, l, base)
    return acc, total


@triton.jit
def _join(o_ptr: tl.tensor, m_ptr: tl.tensor, l_ptr: tl.tensor, sink_ptr: tl.tensor, y_ptr: tl.tensor,
          used: tl.tensor, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, FEW: tl.constexpr) -> None:
    """Combine at most FEW splits of the G query heads of a key head, as :func:`reduce_kernel` does."""
    GP: tl.constexpr = triton.next_power_of_2(G)
    HEADS: tl.constexpr = GP if GP * DP <= AT_ONCE else AT_ONCE // DP
    rd = tl.arange(0, DP)
    for first in range(0, G, HEADS):
        rg = first + tl.arange(0, HEADS)
        base = tl.full([HEADS], float("-inf"), tl.float32)
        for i in tl.static_range(FEW):
            base = tl.maximum(base, tl.load(m_ptr + i * G + rg, mask=(rg < G) & (i < used),
                                            other=float("-inf")))
        sink = tl.zeros([HEADS], tl.float32)
        if sink_ptr is not None:
            sink = tl.load(sink_ptr + rg, mask=rg < G, other=0.0)
            base = tl.maximum(base, sink)
        base = tl.where(base == float("-inf"), 0.0, base)
        a, total_a = _lane(o_ptr, m_ptr, l_ptr, base, rg, used, 0, G, D, DP, FEW)
        b, total_b = _lane(o_ptr, m_ptr, l_ptr, base, rg, used, 1, G, D, DP, FEW)
        c, total_c = _lane(o_ptr, m_ptr, l_ptr, base, rg, used, 2, G, D, DP, FEW)
        d, total_d = _lane(o_ptr, m_ptr, l_ptr, base, rg, used, 3, G, D, DP, FEW)
        total = (total_a + total_b) + (total_c + total_d)
        if sink_ptr is not None:
            total += tl.exp2(sink - base)
        y = _quotient((a + b) + (c + d), total[:, None])
        tl.store(y_ptr + rg[:, None] * D + rd[None, :], y.to(y_ptr.dtype.element_ty),
                 mask=(rg < G)[:, None] & (rd < D)[None, :])


@triton.jit(do_not_specialize=CHANGING)
def split_kv_kernel(q_ptr: tl.tensor, k_ptr: tl.tensor, k_scale_ptr: tl.tensor, k_shift_ptr: tl.tensor,
                    k_residual_ptr: tl.tensor, v_ptr: tl.tensor, v_scale_ptr: tl.tensor,
                    v_shift_ptr: tl.tensor, v_residual_ptr: tl.tensor, at_ptr: tl.tensor,
                    residual_at_ptr: tl.tensor, table_ptr: tl.tensor, residual_table_ptr: tl.tensor,
                    start_ptr: tl.tensor, length_ptr: tl.tensor, seen_ptr: tl.tensor, rows_ptr: tl.tensor,
                    o_ptr: tl.tensor, m_ptr: tl.tensor, l_ptr: tl.tensor, y_ptr: tl.tensor,
                    sink_ptr: tl.tensor, count_ptr: tl.tensor, factor: tl.tensor, cap: tl.tensor,
                    window: tl.tensor, limit: tl.tensor, sinks: tl.tensor, residual_length: tl.tensor,
                    first: tl.tensor, layer: tl.tensor, layers: tl.tensor, width: tl.tensor,
                    residual_width: tl.tensor, q_step: tl.tensor, y_step: tl.tensor, splits: tl.tensor,
                    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, KK: tl.constexpr,
                    KB: tl.constexpr, KC: tl.constexpr, VK: tl.constexpr, VB: tl.constexpr,
                    HAS_RESIDUAL: tl.constexpr, LIMITED: tl.constexpr, PLACED: tl.constexpr,
                    CAPPED: tl.constexpr, ASM: tl.constexpr, VALUES: tl.constexpr, COUNT: tl.constexpr,
                    STAGES: tl.constexpr, FEW: tl.constexpr, CDNA: tl.constexpr) -> None:
    """Attend to one split of one key head for one token.

    o is float32 ``[N, HKV, splits, G, D]``, not yet divided by l, and written only with VALUES and where l
    isn't 0; the maxima m (as exponents of 2) and the sums l are ``[N, HKV, splits, G]``. With FEW, which are
    splits at most, the last program of a head joins them; then y and sink are as in :func:`reduce_kernel`,
    and count has a number of each token's key heads, see
    :func:`~quantkit_kernels.triton.arrivals.is_last`. Else these are ``None``.
    """
    token, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    sequence, place = tl.load(rows_ptr + 2 * token).to(tl.int64), tl.load(rows_ptr + 2 * token + 1)
    row = (sequence * layers + layer) * HKV + head
    length = tl.load(length_ptr + row, mask=sequence >= 0, other=-1 - place) + place + 1
    begin = split * COUNT
    end = tl.minimum((length + 63) // 64, begin + COUNT)
    if FEW:
        y_ptr += token * y_step + head * (G * D)
    if end <= begin:
        if FEW:  # noqa: SIM102 - a constant, and a number on the device
            if split == 0:
                at = tl.arange(0, 16 * DP)
                tl.store(y_ptr + at, tl.zeros([16 * DP], y_ptr.dtype.element_ty), mask=at < G * D)
        return
    query = tl.load(seen_ptr + sequence) + place
    fixed, coded, low, rest = walk(begin, end, length, query, window, limit, sinks, residual_length, first,
                                   HAS_RESIDUAL, LIMITED, PLACED)
    dtype = q_ptr.dtype.element_ty
    rg, rd, rt = tl.arange(0, 16), tl.arange(0, DP), tl.arange(0, 64)
    q_ptr += token * q_step + (head * G + rg)[:, None] * D
    dims = key_dims(KK, KB, DP)
    q = tl.load(q_ptr + dims[None, :], mask=(rg < G)[:, None] & (dims < D)[None, :], other=0.0)
    acc = tl.full([16, DP], 0.0, tl.float32)
    maxima = tl.full([16], float("-inf"), tl.float32)
    total = tl.full([16], 0.0, tl.float32)
    for i in tl.range(tl.maximum(low, fixed), tl.minimum(end, coded), num_stages=STAGES):
        page = tl.load(table_ptr + row * width + i - fixed).to(tl.int64)
        slot = i * 64 + rt
        stored = slot < length
        s = scores(q, k_ptr, k_scale_ptr, k_shift_ptr, page, KK, KB, KC, D, DP, ASM)
        s = scaled(s, factor, cap, CAPPED)
        attended = stored
        if LIMITED:
            if PLACED:
                slot = tl.load(at_ptr + page * 64 + rt)
            attended = stored & visible(slot, query, window, limit, sinks)
        s = tl.where(attended[None, :], s, float("-inf"))
        p, shrink, maxima, total = update(s, maxima, total)
        if VALUES:
            acc = add_values(acc * shrink[:, None], p, v_ptr, v_scale_ptr, v_shift_ptr, page, stored,
                             VK, VB, D, DP, dtype, ASM)
    if HAS_RESIDUAL:
        plain = tl.load(q_ptr + rd[None, :], mask=(rg < G)[:, None] & (rd < D)[None, :], other=0.0)
        start = tl.load(start_ptr + row) // 64
        early = tl.maximum(tl.minimum(end, fixed) - low, 0)
        for j in range(early + tl.maximum(end - rest, 0)):
            i, page = residual_page(residual_table_ptr + row * residual_width, j, early, low, rest, fixed,
                                    start)
            slot = i * 64 + rt
            stored = slot < length
            s = scaled(vector_scores(plain, k_residual_ptr, page, D, DP), factor, cap, CAPPED)
            attended = stored
            if LIMITED:
                if PLACED:
                    slot = tl.load(residual_at_ptr + page * 64 + rt)
                attended = stored & visible(slot, query, window, limit, sinks)
            s = tl.where(attended[None, :], s, float("-inf"))
            p, shrink, maxima, total = update(s, maxima, total)
            if VALUES:
                acc = add_vectors(acc * shrink[:, None], p, v_residual_ptr, page, stored, VK, VB, D, DP,
                                  dtype)
    row_out = ((token * HKV + head) * splits + split) * G + rg
    if VALUES:
        acc = natural(acc, VK, VB, dtype)
        inside = ((rg < G) & (total > 0))[:, None] & (rd < D)[None, :]
        tl.store(o_ptr + row_out[:, None] * D + rd[None, :], acc, mask=inside)
    tl.store(m_ptr + row_out, maxima, mask=rg < G)
    tl.store(l_ptr + row_out, total, mask=rg < G)
    if FEW:
        used = tl.minimum((length + 64 * COUNT - 1) // (64 * COUNT), splits)
        if is_last(count_ptr + token * HKV + head, used, CDNA):
            at = (token * HKV + head) * splits * G
            _join(o_ptr + at * D, m_ptr + at, l_ptr + at, None if sink_ptr is None else sink_ptr + head * G,
                  y_ptr, used, G, D, DP, FEW)


@triton.jit(do_not_specialize=["layer", "layers", "splits"])
def reduce_kernel(o_ptr: tl.tensor, m_ptr: tl.tensor, l_ptr: tl.tensor, length_ptr: tl.tensor,
                  rows_ptr: tl.tensor, y_ptr: tl.tensor, layer: tl.tensor, layers: tl.tensor,
                  y_step: tl.tensor, splits: tl.tensor, sink_ptr: tl.tensor, HKV: tl.constexpr,
                  G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, COUNT: tl.constexpr,
                  WIDTH: tl.constexpr, EARLY: tl.constexpr) -> None:
    """Combine the splits of WIDTH dimensions of one query head for one token.

    y is ``[N, HKV * G, D]``; sink float32 ``[HKV * G]``, in powers of two, or ``None``; the other arguments
    are as in :func:`split_kv_kernel`.
    """
    if EARLY:
        let_next_begin()
    PARTS: tl.constexpr = DP // WIDTH
    token, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    g, part = part // PARTS, part % PARTS
    sequence, place = tl.load(rows_ptr + 2 * token).to(tl.int64), tl.load(rows_ptr + 2 * token + 1)
    rj, rd = tl.arange(0, LANES), part * WIDTH + tl.arange(0, WIDTH)
    used = 0
    if sequence >= 0:
        length = tl.load(length_ptr + (sequence * layers + layer) * HKV + head) + place + 1
        used = tl.minimum((tl.maximum(length, 0) + 64 * COUNT - 1) // (64 * COUNT), splits)
    row = (token * HKV + head) * splits
    every = tl.arange(0, 128)
    maxima = tl.full([128], float("-inf"), tl.float32)
    for i in range(0, used, 128):
        maxima = tl.maximum(maxima, tl.load(m_ptr + (row + i + every) * G + g, mask=i + every < used,
                                            other=float("-inf")))
    base = tl.max(maxima, 0)
    sink = 0.0
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + head * G + g)
        base = tl.maximum(base, sink)
    base = tl.where(base == float("-inf"), 0.0, base)
    acc, total = tl.zeros([LANES, WIDTH], tl.float32), tl.zeros([LANES], tl.float32)
    for i in tl.range(0, used, LANES, loop_unroll_factor=16):  # 16 loads on their way at once
        index, inside = (row + i + rj) * G + g, i + rj < used
        m = tl.load(m_ptr + index, mask=inside, other=float("-inf"))
        l = tl.load(l_ptr + index, mask=inside, other=0.0)  # noqa: E741
        # loaded without waiting for the weights; what was never written may be NaN
        at = o_ptr + ((row + tl.minimum(i + rj, used - 1)) * G + g)[:, None] * D + rd[None, :]
        o = tl.load(at) if D == DP else tl.load(at, mask=(rd < D)[None, :], other=0.0)
        acc, total = _add_split(acc, total, o, m, l, base)
    acc, total = _sum_of_lanes(acc), _sum_of_lanes(total[:, None])
    if sink_ptr is not None:
        total += tl.exp2(sink - base)
    tl.store(y_ptr + token * y_step + (head * G + g) * D + rd,
             _quotient(acc, total).to(y_ptr.dtype.element_ty), mask=rd < D)


def options(family: str, k: SideLayout, v: SideLayout, d: int) -> dict[str, int]:
    """Return the launch options of :func:`split_kv_kernel`."""
    if family == "cdna":  # a warp has 64 lanes
        return {"STAGES": 1, "num_warps": 2}
    # a page's number is loaded before the page: 5 stages keep 2 loads in flight, 7 stages keep 3
    plain = k.kind == v.kind == PLAIN
    wide = d > 128 or plain or (k.kind == HADAMARD and k.bits < 4)
    stages = 7 if k.bits < 8 and v.bits < 8 else 5
    # plain pages are large: one on its way is enough on Hopper, and GPUs of 8.6, 8.9 and 12.0 have no room
    # for more where vectors are long
    if plain and (family == "hopper" or (family == "ampere" and d > 128)):
        stages = 3
    options = {"STAGES": stages, "num_warps": 4 if wide else 2}
    # without a bound ptxas gives up registers for occupancy there, and spills
    bound = ((family == "blackwell" and not wide and (d <= 64 or k.bits == v.bits == 8))
             or (family == "ampere" and d > 64 and (k.bits < 4 or not wide)))
    return options | ({"maxnreg": 255} if bound else {})


def can_join(family: str, k: SideLayout) -> bool:
    """Whether :func:`split_kv_kernel` has registers left to join splits."""
    return family != "blackwell" or k.bits >= 4


@dataclass(frozen=True)
class SplitResults:
    """The results of :func:`split_kv_kernel`, float32: ``o [N, Hkv, splits, G, D]``, and ``m`` and ``l``
    without the last dimension."""

    o: torch.Tensor
    m: torch.Tensor
    l: torch.Tensor  # noqa: E741

    @classmethod
    def of(cls, q: torch.Tensor, kv_heads: int, longest: int, values: bool = True) -> SplitResults:
        """Allocate results for queries ``[N, H, D]`` and ``longest`` slots; without ``values`` o is empty."""
        n, h, d = q.shape
        shape = (n, kv_heads, max(1, -(-longest // (64 * PIECE))), h // kv_heads)
        o = torch.empty(*shape, d if values else 0, dtype=torch.float32, device=q.device)
        m, total = torch.empty(2, *shape, dtype=torch.float32, device=q.device)
        return cls(o, m, total)


def run_pieces(splits: SplitResults, q: torch.Tensor, pages: LayerPages, tables: SequenceTables,
               step: StepTokens, layer: int, scale: float, window: int | None, limit: int | None, sinks: int,
               softcap: float | None, values: bool = True, out: torch.Tensor | None = None,
               sink_scores: torch.Tensor | None = None) -> dict[str, Any]:
    """Launch :func:`split_kv_kernel`, which joins the splits if ``out`` is given. Returns compile-time
    arguments that it shares with other kernels."""
    common = constants_of(q, pages, tables, window, limit, softcap)
    n, hkv, count = splits.m.shape[:3]
    family = family_of(q.device)
    split_kv_kernel[(n, hkv, count)](
        **pointers(q, pages, tables, step), o_ptr=splits.o if values else splits.m, m_ptr=splits.m,
        l_ptr=splits.l, y_ptr=out, sink_ptr=sink_scores,
        count_ptr=None if out is None else counters(q.device),
        **numbers(q, tables, layer, scale, window, limit, sinks, softcap),
        y_step=0 if out is None else out.stride(0), splits=count, **common, VALUES=values, COUNT=PIECE,
        FEW=0 if out is None else FEW, CDNA=family == "cdna",
        **options(family, pages.k.coding, pages.v.coding, q.shape[2]))
    return common


def decode_attention(q: torch.Tensor, pages: LayerPages, tables: SequenceTables, step: StepTokens, layer: int,
                     *, scale: float, window: int | None = None, limit: int | None = None, sinks: int = 0,
                     softcap: float | None = None, sink_scores: torch.Tensor | None = None,
                     out: torch.Tensor | None = None, splits: SplitResults | None = None) -> torch.Tensor:
    """Return ``softmax(scale · q kᵀ) v`` of each token over the slots of its heads, up to its own slot.

    Args:
        q: ``[N, H, D]``, with RoPE applied (and Hadamard-rotated if keys are), bfloat16, float16 or, in the
            interpreter, float32; tokens may have gaps between them. At most 16 heads share a key head.
        pages: the pages of one layer. Keys and values of the step have been stored in them.
        tables, step: of all sequences; N tokens. The result of a token that belongs to no sequence is zeros.
        layer: index in the tables.
        scale: multiplies the scores.
        window: if given, only slots at positions above the query's minus ``window`` are visible.
        limit, sinks: if given, only slots at positions above the query's minus ``limit``, or below ``sinks``,
            are visible.
        softcap: if given, a score x becomes ``softcap · tanh(x / softcap)``.
        sink_scores: a further score of each head, of no key and with no value, float32 ``[H]``, times
            log₂ e.
        out: ``[N, H, D]`` of q's dtype; tokens may have gaps between them.
        splits: memory from :meth:`SplitResults.of`; afterwards it contains maxima and sums of the softmax.

    Returns:
        ``[N, H, D]``; if values are Hadamard-rotated, so is the result.

    Raises:
        ValueError: no kernel reads these layouts, or shapes or dtypes don't match.
    """
    check(q, pages, tables, step, layer)
    n, h, d = q.shape
    if out is None:
        out = torch.empty(n, h, d, dtype=q.dtype, device=q.device)
    if out.shape != q.shape or out.dtype != q.dtype or out.stride()[1:] != (d, 1):
        raise ValueError("q and out don't fit together: out must have q's shape and dtype, and heads "
                         "without gaps")
    if n == 0:
        return out
    hkv = tables.pages.shape[2]
    splits = splits or SplitResults.of(q, hkv, step.longest)
    few = (can_join(family_of(q.device), pages.k.coding) and splits.m.shape[2] <= FEW and n * hkv <= COUNTERS
           and h // hkv * triton.next_power_of_2(d) <= LARGEST)
    common = run_pieces(splits, q, pages, tables, step, layer, scale, window, limit, sinks, softcap,
                        out=out if few else None, sink_scores=sink_scores if few else None)
    if few:
        return out
    width = min(WIDTH, common["DP"])
    reduce_kernel[(n, hkv, h // hkv * common["DP"] // width)](
        splits.o, splits.m, splits.l, tables.lengths, step.rows, out, layer, tables.pages.shape[1],
        out.stride(0), splits.m.shape[2], sink_scores,
        **{name: common[name] for name in ("HKV", "G", "D", "DP")},
        COUNT=PIECE, WIDTH=width, EARLY=starts(q.device), num_warps=1)
    return out
