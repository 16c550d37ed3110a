"""Decoding attention over paged keys and values: one query a sequence.

A page holds 64 slots of one key head; every sequence has a page table for each of its key heads, so
that heads may hold different positions. https://arxiv.org/abs/2309.06180

The query heads that share a key head are the 16 rows of one matrix product. A sequence is cut into pieces
of a fixed number of pages, whatever stands beside it in the batch; a second kernel joins the pieces by
their log-sum-exp, in order (https://crfm.stanford.edu/2023/10/12/flashdecoding.html). So a sequence's result
doesn't depend on the others, and there are no atomics.

int8 codes enter the products as they are: a key's scale multiplies its score, a value's its weight.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from quantkit_kernels.triton.fragment import MAGIC, family_of, int8_pair
from quantkit_kernels.triton.rope_kv import Pages

PAGE = 64
PIECE = 8
"""Pages that one program reads: 512 tokens."""
HEADS = 16
"""Rows of a product: at most so many query heads share a key head."""
JOIN = 16
"""Pieces that are joined at a time."""


@triton.jit
def _scales(ptr: tl.tensor, page: tl.tensor) -> tl.tensor:
    """The 64 bfloat16 scales of a page, loaded two a word → float32."""
    w = tl.load(ptr + page * 32 + tl.arange(0, 32))
    low, high = (w << 16).to(tl.float32, bitcast=True), (w & -65536).to(tl.float32, bitcast=True)
    return tl.join(low, high).reshape(64)


@triton.jit
def _keys(w: tl.tensor, magic: tl.tensor, DTYPE: tl.constexpr, W: tl.constexpr) -> tl.tensor:
    """Words ``[W, 64]`` → ``[4 W, 64]``: of four neighbouring words the even bytes, then the odd ones."""
    a0, a1 = int8_pair(w, magic, DTYPE)
    b0, b1 = int8_pair(w >> 8, magic, DTYPE)
    k = tl.join(tl.join(a0, a1), tl.join(b0, b1)).reshape(W // 4, 4, 64, 2, 2)
    return k.trans(0, 4, 1, 3, 2).reshape(4 * W, 64)


@triton.jit
def _values(even: tl.tensor, odd: tl.tensor, magic: tl.tensor, DTYPE: tl.constexpr,
            W: tl.constexpr) -> tl.tensor:
    """Words ``[32, W]`` of even and of odd tokens → ``[64, 4 W]``: first the lowest bytes of all words."""
    a0, a1 = int8_pair((even & 0xFF) | (odd << 16), magic, DTYPE)
    b0, b1 = int8_pair(((even >> 8) & 0xFF) | ((odd << 8) & 0xFF0000), magic, DTYPE)
    c0, c1 = int8_pair(((even >> 16) & 0xFF) | (odd & 0xFF0000), magic, DTYPE)
    d0, d1 = int8_pair(((even >> 24) & 0xFF) | ((odd >> 8) & 0xFF0000), magic, DTYPE)
    v = tl.join(tl.join(tl.join(a0, a1), tl.join(c0, c1)), tl.join(tl.join(b0, b1), tl.join(d0, d1)))
    return v.trans(0, 2, 3, 4, 1).reshape(64, 4 * W)


@triton.jit(do_not_specialize=["window", "sinks", "width", "pieces"])  # they change while decoding
def piece_kernel(q_ptr: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, sk_ptr: tl.tensor, sv_ptr: tl.tensor,
                 at_ptr: tl.tensor, table_ptr: tl.tensor, length_ptr: tl.tensor, now_ptr: tl.tensor,
                 o_ptr: tl.tensor, m_ptr: tl.tensor, l_ptr: tl.tensor, factor: tl.tensor, window: tl.tensor,
                 sinks: tl.tensor, magic: tl.tensor, width: tl.tensor, pieces: tl.tensor, HKV: tl.constexpr,
                 G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CODED: tl.constexpr,
                 LIMITED: tl.constexpr, PLACED: tl.constexpr, COUNT: tl.constexpr,
                 STAGES: tl.constexpr) -> None:
    """One piece of one key head of one sequence.

    q ``[B, HKV * G, D]``; k, v ``[P, 64, D]``, codes as int32 ``[P, 64, D / 4]``, scales as int32
    ``[P, 32]``; table int32 ``[B, HKV, width]``; o float32 ``[B, HKV, pieces, G, D]``, not yet divided by l;
    m (in powers of two) and l ``[B, HKV, pieces, G]``.
    """
    sequence, head, piece = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    row = sequence * HKV + head
    length = tl.load(length_ptr + row)
    first = piece * COUNT
    pages = tl.minimum((length + 63) // 64 - first, COUNT)
    if pages <= 0:
        return
    W: tl.constexpr = DP // 4
    dtype = q_ptr.dtype.element_ty
    # float16 weights times small scales would vanish; the largest scale of a float16 number is 516
    LIFT: tl.constexpr = 64.0 if CODED and q_ptr.dtype.element_ty.is_fp16() else 1.0
    rg, rd, rt, rw = tl.arange(0, 16), tl.arange(0, DP), tl.arange(0, 64), tl.arange(0, W)
    rq = rd // 16 * 16 + rd // 2 % 4 * 4 + rd // 8 % 2 + rd % 2 * 2 if CODED else rd  # as _keys orders them
    q = tl.load(q_ptr + (row * G + rg)[:, None] * D + rq[None, :], mask=(rg < G)[:, None] & (rq < D)[None, :],
                other=0.0)
    acc = tl.full([16, DP], 0.0, tl.float32)
    most = tl.full([16], float("-inf"), tl.float32)
    total = tl.full([16], 0.0, tl.float32)
    for i in tl.range(0, pages, num_stages=STAGES):
        page = tl.load(table_ptr + row * width + first + i).to(tl.int64)
        at = (first + i) * 64 + rt
        held = at < length
        if CODED:
            words = page * (16 * D) + rw
            here = words[:, None] + rt[None, :] * (D // 4)
            if D == DP:
                w = tl.load(k_ptr + here)
            else:
                w = tl.load(k_ptr + here, mask=(rw < D // 4)[:, None], other=0)
            s = tl.dot(q, _keys(w, magic, dtype, W), input_precision="ieee")
            s *= (_scales(sk_ptr, page) * factor)[None, :]
        else:
            here = page * (64 * D) + rt[None, :] * D + rd[:, None]
            k = tl.load(k_ptr + here) if D == DP else tl.load(k_ptr + here, mask=(rd < D)[:, None], other=0.0)
            s = tl.dot(q, k, input_precision="ieee") * factor
        seen = held
        if LIMITED:
            if PLACED:
                at = tl.load(at_ptr + page * 64 + rt)
            seen = held & ((at < sinks) | (at > tl.load(now_ptr + sequence) - window))
        s = tl.where(seen[None, :], s, float("-inf"))
        higher = tl.maximum(most, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(most - base)
        total = total * shrink + tl.sum(p, 1)
        most = higher
        if CODED:
            # what was never written may be NaN, and NaN times 0 is NaN
            p = (p * tl.where(held, _scales(sv_ptr, page) * LIFT, 0.0)[None, :])
            here = page * (16 * D) + tl.arange(0, 32)[:, None] * (D // 2) + rw[None, :]
            if D == DP:
                even, odd = tl.load(v_ptr + here), tl.load(v_ptr + here + D // 4)
            else:
                even = tl.load(v_ptr + here, mask=(rw < D // 4)[None, :], other=0)
                odd = tl.load(v_ptr + here + D // 4, mask=(rw < D // 4)[None, :], other=0)
            v = _values(even, odd, magic, dtype, W)
        else:
            here = page * (64 * D) + rt[:, None] * D + rd[None, :]
            v = tl.load(v_ptr + here, mask=held[:, None] if D == DP else held[:, None] & (rd < D)[None, :],
                        other=0.0)
        acc = tl.dot(p.to(dtype), v, acc * shrink[:, None], input_precision="ieee")
    if CODED:
        acc = acc.reshape(16, 4, W).trans(0, 2, 1).reshape(16, DP) * (1.0 / LIFT)
    here = (row * pieces + piece) * G + rg
    tl.store(o_ptr + here[:, None] * D + rd[None, :], acc, mask=(rg < G)[:, None] & (rd < D)[None, :])
    tl.store(m_ptr + here, most, mask=rg < G)
    tl.store(l_ptr + here, total, mask=rg < G)


@triton.jit(do_not_specialize=["pieces"])
def join_kernel(o_ptr: tl.tensor, m_ptr: tl.tensor, l_ptr: tl.tensor, length_ptr: tl.tensor, y_ptr: tl.tensor,
                pieces: tl.tensor, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, COUNT: tl.constexpr,
                JOIN: tl.constexpr) -> None:
    """One query head of one sequence: y ``[B * HKV, G, D]``; the rest as in :func:`piece_kernel`."""
    row, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rj, rd = tl.arange(0, JOIN), tl.arange(0, DP)
    used = (tl.load(length_ptr + row) + 64 * COUNT - 1) // (64 * COUNT)
    most = tl.full([JOIN], float("-inf"), tl.float32)
    for i in range(0, used, JOIN):
        at = (row * pieces + i + rj) * G + g
        most = tl.maximum(most, tl.load(m_ptr + at, mask=i + rj < used, other=float("-inf")))
    base = tl.max(most, 0)
    base = tl.where(base == float("-inf"), 0.0, base)
    total = tl.full([JOIN], 0.0, tl.float32)
    acc = tl.full([DP], 0.0, tl.float32)
    for i in range(0, used, JOIN):
        at = (row * pieces + i + rj) * G + g
        weight = tl.exp2(tl.load(m_ptr + at, mask=i + rj < used, other=float("-inf")) - base)
        total += weight * tl.load(l_ptr + at, mask=i + rj < used, other=0.0)
        o = tl.load(o_ptr + at[:, None] * D + rd[None, :],
                    mask=(i + rj < used)[:, None] & (rd < D)[None, :], other=0.0)
        acc += tl.sum(o * weight[:, None], 0)
    whole = tl.sum(total, 0)
    y = tl.where(whole > 0, acc / tl.where(whole > 0, whole, 1.0), 0.0)
    tl.store(y_ptr + (row * G + g) * D + rd, y.to(y_ptr.dtype.element_ty), mask=rd < D)


def constants(h: int, hkv: int, d: int) -> dict[str, int]:
    """Compile-time arguments that both kernels take."""
    return {"G": h // hkv, "D": d, "DP": max(16, triton.next_power_of_2(d)), "COUNT": PIECE}


def options(family: str) -> dict[str, int]:
    """How :func:`piece_kernel` is launched."""
    if family == "cdna":  # a warp has 64 lanes
        return {"STAGES": 1, "num_warps": 2}
    return {"STAGES": 3, "num_warps": 4}


def paged_attention(q: torch.Tensor, pages: Pages, table: torch.Tensor, lengths: torch.Tensor,
                    scale: float | None = None, window: int | None = None, sinks: int = 0,
                    query_positions: torch.Tensor | None = None) -> torch.Tensor:
    """``softmax(scale · q kᵀ) v`` of one query a sequence over what its heads hold.

    Args:
        q: ``[B, H, D]``, rotated; bfloat16, float16 or float32.
        pages: of one layer; H is a multiple of the number of key heads, at most 16 times it.
        table: int32 ``[B, Hkv, max_pages]``, the pages of a head's slots in order; behind them anything.
        lengths: int32 ``[B, Hkv]``, slots that are held. A head that holds none gives zeros.
        scale: of the scores; by default ``1 / sqrt(D)``.
        window: if given, a slot is visible only if its position is above the query's minus ``window``, or
            below ``sinks``.
        sinks: see ``window``.
        query_positions: int32 ``[B]``, with ``window``.

    Returns:
        ``[B, H, D]`` in q's dtype.

    Raises:
        ValueError: shapes or dtypes don't fit.
    """
    b, h, d = q.shape
    hkv, width = table.shape[1:]
    if (h % hkv or h // hkv > HEADS or pages.k.shape[1:] != (PAGE, d) or lengths.shape != (b, hkv)
            or table.shape[0] != b or table.dtype != torch.int32 or lengths.dtype != torch.int32
            or not (pages.coded or pages.k.dtype == q.dtype)):
        raise ValueError("q, pages, table and lengths don't fit together")
    if window is not None and (query_positions is None or query_positions.shape != (b,)):
        raise ValueError("a window needs the queries' positions, [B]")
    q, table, lengths = q.contiguous(), table.contiguous(), lengths.contiguous()
    y = torch.empty_like(q)
    if b == 0:
        return y
    pieces = max(1, -(-width // PIECE))
    partial = q.new_empty(b, hkv, pieces, h // hkv, d, dtype=torch.float32)
    most, total = (q.new_empty(b, hkv, pieces, h // hkv, dtype=torch.float32) for _ in range(2))
    parts = (pages.k, pages.v, lengths, lengths)
    if pages.k_scale is not None and pages.v_scale is not None:
        k, v, ks, vs = (x.view(torch.int32) for x in (pages.k, pages.v, pages.k_scale, pages.v_scale))
        parts = (k, v, ks, vs)
    factor = (1 / math.sqrt(d) if scale is None else scale) * math.log2(math.e)
    common = constants(h, hkv, d)
    piece_kernel[(b, hkv, pieces)](
        q, *parts, lengths if pages.positions is None else pages.positions, table, lengths,
        lengths if query_positions is None else query_positions.to(torch.int32).contiguous(),
        partial, most, total, factor, window or 0, sinks, MAGIC[q.dtype], width, pieces,
        HKV=hkv, CODED=pages.coded, LIMITED=window is not None, PLACED=pages.positions is not None, **common,
        **options(family_of(q.device)))
    join_kernel[(b * hkv, h // hkv)](partial, most, total, lengths, y, pieces, JOIN=JOIN, **common)
    return y
