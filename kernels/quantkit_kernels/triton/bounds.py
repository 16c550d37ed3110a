"""Bounds on the scores of a row: what top-k and top-p leave. Nothing is sorted.

A bound is a number; it is searched 4 bits at a time, from the highest on. Each pass adds up what lies in each
of 16 intervals (tokens, or their probability), a program for each part of a row; the next one looks only into
that which holds the bound. Sums have a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quantkit_kernels.triton.argmax import INFINITY, LogitSplits

CHUNK = 512
"""Logits that are sorted into intervals at a time."""
LOW = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""Lowest bits of a float32 that are 0 in every number of a dtype."""
WARPS = 4
_BINS = tl.constexpr(16)


@triton.jit
def highest(value_ptr: tl.tensor, row: tl.tensor, PARTS: tl.constexpr, PAD: tl.constexpr) -> tl.tensor:
    rp = tl.arange(0, PAD)
    return tl.max(tl.load(value_ptr + row * PARTS + rp, mask=rp < PARTS, other=-INFINITY))


@triton.jit
def scored(x: tl.tensor, peak: tl.tensor, warm: tl.tensor) -> tl.tensor:
    """Logits over the temperature, the largest at 0; rounded as torch rounds."""
    return tl.math.div_rn(x - peak, tl.zeros_like(x) + warm)


@triton.jit
def _key(x: tl.tensor, LOW: tl.constexpr) -> tl.tensor:
    """uint32 that fall as x rises."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits, bits ^ 0x7FFFFFFF).to(tl.uint32, bitcast=True) >> LOW


@triton.jit
def _value(key: tl.tensor, LOW: tl.constexpr) -> tl.tensor:
    """What has that key."""
    bits = (key << LOW).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits, bits ^ 0x7FFFFFFF) & -(1 << LOW)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _found(table_ptr: tl.tensor, key_ptr: tl.tensor, sum_ptr: tl.tensor, row: tl.tensor, rows: tl.tensor,
           done: tl.tensor, amount: tl.tensor, WEIGHTED: tl.constexpr, PARTS: tl.constexpr,
           PAD: tl.constexpr) -> tl.tensor:
    """The highest ``4 · done`` bits of the key that is searched, the sum below it, and that to be reached.

    It is the lowest key up to which tokens amount to ``amount``, or with WEIGHTED to that share of all.
    """
    key = tl.full([], 0, tl.uint32)
    below = tl.full([], 0.0, tl.float32)
    wanted = below + amount
    if done > 0:
        before = (done - 1) * rows + row
        rp, rb = tl.arange(0, PAD), tl.arange(0, _BINS)
        here = before * (PARTS * _BINS) + rp[:, None] * _BINS + rb[None, :]
        sums = tl.sum(tl.load(table_ptr + here, mask=(rp < PARTS)[:, None], other=0.0), 0)
        key = tl.load(key_ptr + before).to(tl.uint32, bitcast=True)
        below = tl.load(sum_ptr + 2 * before)
        wanted = tl.load(sum_ptr + 2 * before + 1)
        up_to = tl.cumsum(sums, 0)
        if WEIGHTED:
            wanted = tl.where(done == 1, amount * tl.max(up_to), wanted)
        some = sums > 0
        # a sum of sums may be rounded to less than what was found before: then it is the last that has any
        digit = tl.minimum(tl.min(tl.where((below + up_to >= wanted) & some, rb, _BINS)),
                           tl.max(tl.where(some, rb, 0)))
        below += tl.sum(tl.where(rb < digit, sums, 0.0))
        key = key * _BINS + digit.to(tl.uint32)
    return key, below, wanted


@triton.jit
def _asked(k_ptr: tl.tensor, p_ptr: tl.tensor, row: tl.tensor, v: tl.tensor,
           WEIGHTED: tl.constexpr) -> tl.tensor:
    """Whether a row has this bound, and what it amounts to."""
    if WEIGHTED:
        share = tl.load(p_ptr + row).to(tl.float32)
        return share < 1, share
    else:
        count = tl.load(k_ptr + row).to(tl.int64)
        return (count > 0) & (count < v), count.to(tl.float32)


@triton.jit(do_not_specialize=["rows", "done"])
def search_kernel(x_ptr: tl.tensor, value_ptr: tl.tensor, warm_ptr: tl.tensor, k_ptr: tl.tensor,
                  p_ptr: tl.tensor, bound_ptr: tl.tensor, table_ptr: tl.tensor, key_ptr: tl.tensor,
                  sum_ptr: tl.tensor, step: tl.tensor, v: tl.tensor, rows: tl.tensor, done: tl.tensor,
                  WEIGHTED: tl.constexpr, BOUND: tl.constexpr, PASSES: tl.constexpr, LOW: tl.constexpr,
                  PARTS: tl.constexpr, PAD: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr) -> None:
    """Pass ``done`` over one part of a row: what lies in each of 16 intervals.

    table float32 ``[PASSES, rows, PARTS, 16]``: tokens, or with WEIGHTED ``exp(score)`` of those not below
    ``bound [rows]`` (with BOUND). What is known before it is left for the next: key int32
    ``[PASSES, rows]``, sum float32 ``[PASSES, rows, 2]``.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    warm = tl.load(warm_ptr + row).to(tl.float32)
    asked, amount = _asked(k_ptr, p_ptr, row, v, WEIGHTED)
    if asked & (warm > 0):
        known, below, wanted = _found(table_ptr, key_ptr, sum_ptr, row, rows, done, amount, WEIGHTED, PARTS,
                                      PAD)
        if part == 0:
            now = done * rows + row
            tl.store(key_ptr + now, known.to(tl.int32, bitcast=True))
            tl.store(sum_ptr + 2 * now, below)
            tl.store(sum_ptr + 2 * now + 1, wanted)
        peak = highest(value_ptr, row, PARTS, PAD)
        shift = (PASSES - 1 - done) * 4
        rb = tl.arange(0, _BINS)
        table = tl.zeros([_BINS, CHUNK], tl.float32)
        for i in tl.static_range(0, PART, CHUNK):
            rv = part * PART + i + tl.arange(0, CHUNK)
            x = tl.load(x_ptr + row.to(tl.int64) * step + rv, mask=rv < v, other=0.0).to(tl.float32)
            key = _key(x, LOW) >> shift.to(tl.uint32)
            inside = (rv < v) & ((key >> 4) == known)
            weight = tl.full([CHUNK], 1.0, tl.float32)
            if WEIGHTED:
                score = scored(x, peak, warm)
                weight = tl.exp(score)
                if BOUND:
                    inside &= score >= tl.load(bound_ptr + row)
            digit = tl.where(inside, (key & 15).to(tl.int32), _BINS)
            table += tl.where(rb[:, None] == digit[None, :], weight[None, :], 0.0)
        here = ((done * rows + row) * PARTS + part) * _BINS
        tl.store(table_ptr + here + rb, tl.sum(table, 1))


@triton.jit(do_not_specialize=["rows"])
def settle_kernel(value_ptr: tl.tensor, warm_ptr: tl.tensor, k_ptr: tl.tensor, p_ptr: tl.tensor,
                  before_ptr: tl.tensor, table_ptr: tl.tensor, key_ptr: tl.tensor, sum_ptr: tl.tensor,
                  bound_ptr: tl.tensor, total_ptr: tl.tensor, v: tl.tensor, rows: tl.tensor,
                  WEIGHTED: tl.constexpr, BOUND: tl.constexpr, PASSES: tl.constexpr, LOW: tl.constexpr,
                  PARTS: tl.constexpr, PAD: tl.constexpr) -> None:
    """One row, after all passes: the lowest score that is kept, and with WEIGHTED the sum to be reached.

    bound, total float32 ``[rows]``; without a bound of its own a row's is that in ``before`` (with BOUND).
    """
    row = tl.program_id(0)
    warm = tl.load(warm_ptr + row).to(tl.float32)
    asked, amount = _asked(k_ptr, p_ptr, row, v, WEIGHTED)
    bound = tl.full([], -INFINITY, tl.float32)
    wanted = tl.full([], INFINITY, tl.float32)
    if BOUND:
        bound = tl.load(before_ptr + row)
    if asked & (warm > 0):
        key, _, wanted = _found(table_ptr, key_ptr, sum_ptr, row, rows, PASSES, amount, WEIGHTED, PARTS, PAD)
        bound = scored(_value(key, LOW), highest(value_ptr, row, PARTS, PAD), warm)
    tl.store(bound_ptr + row, bound)
    if WEIGHTED:
        tl.store(total_ptr + row, wanted)


def passes(dtype: torch.dtype) -> int:
    """Of a search among numbers of a dtype."""
    return -(-(32 - LOW[dtype]) // 4)


def bounds(logits: torch.Tensor, c: LogitSplits, value: torch.Tensor, temperature: torch.Tensor,
           top_k: torch.Tensor | None,
           top_p: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Of every row the least score, (logit - largest) / temperature, that is left.

    Args:
        logits: ``[B, V]``, rows without gaps.
        c: how they are cut.
        value: float32 ``[B, parts]``, the parts' largest.
        temperature, top_k, top_p: ``[B]``, see :func:`~quantkit_kernels.triton.sampling.choose`.

    Returns:
        The bound, float32 ``[B]``, minus infinity of a row that has none; and what ``exp(score)`` must sum
        up to by top-p, infinity likewise. ``None`` where there is no such setting.
    """
    (b, v), apart = logits.shape, logits.stride(0)
    bound = total = None
    count = passes(logits.dtype)
    kinds = [False] * (top_k is not None) + [True] * (top_p is not None)
    asked = (value if top_k is None else top_k, value if top_p is None else top_p)
    table, sums = (torch.empty(count, b, *shape, dtype=torch.float32, device=logits.device)
                   for shape in ((c.parts if kinds else 0, 16), (2,)))
    known = torch.empty(count, b, dtype=torch.int32, device=logits.device)
    for weighted in kinds:
        about = {"WEIGHTED": weighted, "BOUND": bound is not None, "PASSES": count,
                 "LOW": LOW[logits.dtype], "PARTS": c.parts, "PAD": c.pad}
        before = value if bound is None else bound
        for done in range(count):
            search_kernel[(b, c.parts)](logits, value, temperature, *asked, before, table, known, sums, apart,
                                        v, b, done, PART=c.size, CHUNK=CHUNK, num_warps=WARPS, **about)
        bound, total = (torch.empty(b, dtype=torch.float32, device=logits.device) for _ in range(2))
        settle_kernel[(b,)](value, temperature, *asked, before, table, known, sums, bound, total, v, b,
                            num_warps=1, **about)
    return bound, total if top_p is not None else None
