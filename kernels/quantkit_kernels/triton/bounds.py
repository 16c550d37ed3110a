"""Finds the lowest score in each row that top-k and top-p keep, without sorting.

The bound is found by radix search, 4 bits at a time, from the highest bits on. Each pass adds up the tokens
(top-k) or their probabilities (top-p) in each of 16 intervals, with one program for each part of a row; the
next pass looks only into the interval that contains the bound. Sums have a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quantkit_kernels.triton.argmax import INFINITY, LogitSplits

CHUNK = 512
"""Logits that are counted into intervals at a time."""
LOW = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""How many of the lowest bits of a float32 are 0 in every number of a dtype."""
WARPS = 4
_BINS = tl.constexpr(16)


@triton.jit
def highest(value_ptr: tl.tensor, row: tl.tensor, PARTS: tl.constexpr, PAD: tl.constexpr) -> tl.tensor:
    """Return the largest logit of a row, from the maxima of its parts."""
    rp = tl.arange(0, PAD)
    return tl.max(tl.load(value_ptr + row * PARTS + rp, mask=rp < PARTS, other=-INFINITY))


@triton.jit
def scored(x: tl.tensor, peak: tl.tensor, warm: tl.tensor) -> tl.tensor:
    """Divide logits by the temperature, after subtracting the largest; rounded as torch rounds."""
    return tl.math.div_rn(x - peak, tl.zeros_like(x) + warm)


@triton.jit
def _key(x: tl.tensor, LOW: tl.constexpr) -> tl.tensor:
    """Map floats to uint32 keys whose order is the reverse: the larger x, the smaller its key."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits, bits ^ 0x7FFFFFFF).to(tl.uint32, bitcast=True) >> LOW


@triton.jit
def _value(key: tl.tensor, LOW: tl.constexpr) -> tl.tensor:
    """Return the float that has this key."""
    bits = (key << LOW).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits, bits ^ 0x7FFFFFFF) & -(1 << LOW)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _narrowed_key(table_ptr: tl.tensor, key_ptr: tl.tensor, sum_ptr: tl.tensor, row: tl.tensor,
                  rows: tl.tensor, done: tl.tensor, amount: tl.tensor, WEIGHTED: tl.constexpr,
                  PARTS: tl.constexpr, PAD: tl.constexpr) -> tl.tensor:
    """Return the highest ``4 · done`` bits of the bound's key, the sum before it, and the sum to be reached.

    The bound's key is the lowest one up to which there are ``amount`` tokens, or with WEIGHTED tokens that
    have this share of the probability.
    """
    key = tl.full([], 0, tl.uint32)
    below = tl.full([], 0.0, tl.float32)
    target = below + amount
    if done > 0:
        before = (done - 1) * rows + row
        rp, rb = tl.arange(0, PAD), tl.arange(0, _BINS)
        cells = before * (PARTS * _BINS) + rp[:, None] * _BINS + rb[None, :]
        sums = tl.sum(tl.load(table_ptr + cells, mask=(rp < PARTS)[:, None], other=0.0), 0)
        key = tl.load(key_ptr + before).to(tl.uint32, bitcast=True)
        below = tl.load(sum_ptr + 2 * before)
        target = tl.load(sum_ptr + 2 * before + 1)
        up_to = tl.cumsum(sums, 0)
        if WEIGHTED:
            target = tl.where(done == 1, amount * tl.max(up_to), target)
        occupied = sums > 0
        # rounding may leave the sum of all intervals below the target: then take the last that has tokens
        digit = tl.minimum(tl.min(tl.where((below + up_to >= target) & occupied, rb, _BINS)),
                           tl.max(tl.where(occupied, rb, 0)))
        below += tl.sum(tl.where(rb < digit, sums, 0.0))
        key = key * _BINS + digit.to(tl.uint32)
    return key, below, target


@triton.jit
def _limit_of(k_ptr: tl.tensor, p_ptr: tl.tensor, row: tl.tensor, v: tl.tensor,
              WEIGHTED: tl.constexpr) -> tl.tensor:
    """Return whether a row has this limit, and its value: a number of tokens, or a share of probability."""
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
    """Pass number ``done`` over one part of a row: sum up each of 16 intervals.

    table float32 ``[PASSES, rows, PARTS, 16]`` holds the number of tokens, or with WEIGHTED the sum of
    ``exp(score)`` of those that aren't below ``bound [rows]`` (with BOUND). What this pass knew when it began
    is stored for the next one: key int32 ``[PASSES, rows]``, sum float32 ``[PASSES, rows, 2]``.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    warm = tl.load(warm_ptr + row).to(tl.float32)
    limited, amount = _limit_of(k_ptr, p_ptr, row, v, WEIGHTED)
    if limited & (warm > 0):
        prefix, below, target = _narrowed_key(table_ptr, key_ptr, sum_ptr, row, rows, done, amount, WEIGHTED,
                                              PARTS,
                                      PAD)
        if part == 0:
            entry = done * rows + row
            tl.store(key_ptr + entry, prefix.to(tl.int32, bitcast=True))
            tl.store(sum_ptr + 2 * entry, below)
            tl.store(sum_ptr + 2 * entry + 1, target)
        peak = highest(value_ptr, row, PARTS, PAD)
        shift = (PASSES - 1 - done) * 4
        rb = tl.arange(0, _BINS)
        table = tl.zeros([_BINS, CHUNK], tl.float32)
        for i in tl.static_range(0, PART, CHUNK):
            rv = part * PART + i + tl.arange(0, CHUNK)
            x = tl.load(x_ptr + row.to(tl.int64) * step + rv, mask=rv < v, other=0.0).to(tl.float32)
            key = _key(x, LOW) >> shift.to(tl.uint32)
            inside = (rv < v) & ((key >> 4) == prefix)
            weight = tl.full([CHUNK], 1.0, tl.float32)
            if WEIGHTED:
                score = scored(x, peak, warm)
                weight = tl.exp(score)
                if BOUND:
                    inside &= score >= tl.load(bound_ptr + row)
            digit = tl.where(inside, (key & 15).to(tl.int32), _BINS)
            table += tl.where(rb[:, None] == digit[None, :], weight[None, :], 0.0)
        cells = ((done * rows + row) * PARTS + part) * _BINS
        tl.store(table_ptr + cells + rb, tl.sum(table, 1))


@triton.jit(do_not_specialize=["rows"])
def settle_kernel(value_ptr: tl.tensor, warm_ptr: tl.tensor, k_ptr: tl.tensor, p_ptr: tl.tensor,
                  before_ptr: tl.tensor, table_ptr: tl.tensor, key_ptr: tl.tensor, sum_ptr: tl.tensor,
                  bound_ptr: tl.tensor, total_ptr: tl.tensor, v: tl.tensor, rows: tl.tensor,
                  WEIGHTED: tl.constexpr, BOUND: tl.constexpr, PASSES: tl.constexpr, LOW: tl.constexpr,
                  PARTS: tl.constexpr, PAD: tl.constexpr) -> None:
    """Find one row's lowest score that is kept, after all passes, and with WEIGHTED the sum to be reached.

    bound and total are float32 ``[rows]``. A row without this limit keeps that of ``before`` (with BOUND).
    """
    row = tl.program_id(0)
    warm = tl.load(warm_ptr + row).to(tl.float32)
    limited, amount = _limit_of(k_ptr, p_ptr, row, v, WEIGHTED)
    bound = tl.full([], -INFINITY, tl.float32)
    target = tl.full([], INFINITY, tl.float32)
    if BOUND:
        bound = tl.load(before_ptr + row)
    if limited & (warm > 0):
        key, _, target = _narrowed_key(table_ptr, key_ptr, sum_ptr, row, rows, PASSES, amount, WEIGHTED,
                                       PARTS, PAD)
        bound = scored(_value(key, LOW), highest(value_ptr, row, PARTS, PAD), warm)
    tl.store(bound_ptr + row, bound)
    if WEIGHTED:
        tl.store(total_ptr + row, target)


def passes(dtype: torch.dtype) -> int:
    """Return how many passes a search among numbers of this dtype takes."""
    return -(-(32 - LOW[dtype]) // 4)


def bounds(logits: torch.Tensor, c: LogitSplits, value: torch.Tensor, temperature: torch.Tensor,
           top_k: torch.Tensor | None,
           top_p: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the lowest score, (logit - largest) / temperature, that top-k and top-p keep in every row.

    Args:
        logits: ``[B, V]``, each row contiguous.
        c: how rows are divided into parts.
        value: float32 ``[B, parts]``, the largest logit of each part.
        temperature, top_k, top_p: ``[B]``, see :func:`~quantkit_kernels.triton.sampling.choose`.

    Returns:
        The bound, float32 ``[B]``, which is minus infinity for a row without limits; and the sum of
        ``exp(score)`` that top-p asks for, which is infinity for a row without top-p. The first is ``None``
        if there is neither setting, the second if there is no top-p.
    """
    (b, v), row_step = logits.shape, logits.stride(0)
    bound = total = None
    count = passes(logits.dtype)
    weightings = [False] * (top_k is not None) + [True] * (top_p is not None)
    limits = (value if top_k is None else top_k, value if top_p is None else top_p)
    table, sums = (torch.empty(count, b, *shape, dtype=torch.float32, device=logits.device)
                   for shape in ((c.parts if weightings else 0, 16), (2,)))
    known = torch.empty(count, b, dtype=torch.int32, device=logits.device)
    for weighted in weightings:
        constants = {"WEIGHTED": weighted, "BOUND": bound is not None, "PASSES": count,
                     "LOW": LOW[logits.dtype], "PARTS": c.parts, "PAD": c.pad}
        before = value if bound is None else bound
        for done in range(count):
            search_kernel[(b, c.parts)](logits, value, temperature, *limits, before, table, known, sums,
                                        row_step, v, b, done, PART=c.size, CHUNK=CHUNK, num_warps=WARPS,
                                        **constants)
        bound, total = (torch.empty(b, dtype=torch.float32, device=logits.device) for _ in range(2))
        settle_kernel[(b,)](value, temperature, *limits, before, table, known, sums, bound, total, v, b,
                            num_warps=1, **constants)
    return bound, total if top_p is not None else None
