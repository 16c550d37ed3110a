"""The next token of every row, chosen on the device: nothing waits for the host, nothing is sorted.

There are no atomics and all sums have a fixed order: a row's token depends on its own logits, seed and step
alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quantkit_kernels.triton.argmax import INFINITY, WARPS, checked, cut, peak_of, peaks
from quantkit_kernels.triton.bounds import bounds, highest, scored


@triton.jit(do_not_specialize=["rows"])
def tally_kernel(x_ptr: tl.tensor, value_ptr: tl.tensor, warm_ptr: tl.tensor, min_ptr: tl.tensor,
                 bound_ptr: tl.tensor, tally_ptr: tl.tensor, step: tl.tensor, v: tl.tensor, rows: tl.tensor,
                 BOUND: tl.constexpr, FLOOR: tl.constexpr, PARTS: tl.constexpr, PAD: tl.constexpr,
                 PART: tl.constexpr) -> None:
    """One part of a row. tally float32 ``[3, rows, PARTS]``: ``exp(score)`` of all tokens above the bound, of
    those of them that min-p leaves (with FLOOR), and how many tokens lie on it."""
    row, part = tl.program_id(0), tl.program_id(1)
    warm = tl.load(warm_ptr + row).to(tl.float32)
    if warm > 0:
        bound, floor = _limits(bound_ptr, min_ptr, row, BOUND, FLOOR)
        rv = part * PART + tl.arange(0, PART)
        x = tl.load(x_ptr + row.to(tl.int64) * step + rv, mask=rv < v, other=-INFINITY).to(tl.float32)
        score = scored(x, highest(value_ptr, row, PARTS, PAD), warm)
        weight = tl.where(score > bound, tl.exp(score), 0.0)
        to = tally_ptr + row * PARTS + part
        tl.store(to, tl.sum(weight))
        tl.store(to + rows * PARTS, tl.sum(tl.where(score >= floor, weight, 0.0)))
        tl.store(to + 2 * rows * PARTS, tl.sum(tl.where((score == bound) & (rv < v), 1.0, 0.0)))


@triton.jit
def _limits(bound_ptr: tl.tensor, min_ptr: tl.tensor, row: tl.tensor, BOUND: tl.constexpr,
            FLOOR: tl.constexpr) -> tl.tensor:
    """The least scores that top-k and top-p leave, and that min-p does."""
    bound = tl.full([], -INFINITY, tl.float32)
    floor = tl.full([], -INFINITY, tl.float32)
    if BOUND:
        bound = tl.load(bound_ptr + row)
    if FLOOR:
        floor = tl.log(tl.load(min_ptr + row).to(tl.float32))
    return bound, floor


@triton.jit(do_not_specialize=["rows"])
def draw_kernel(x_ptr: tl.tensor, value_ptr: tl.tensor, id_ptr: tl.tensor, finite_ptr: tl.tensor,
                warm_ptr: tl.tensor, min_ptr: tl.tensor, bound_ptr: tl.tensor, total_ptr: tl.tensor,
                tally_ptr: tl.tensor, seed_ptr: tl.tensor, step_ptr: tl.tensor, out_ptr: tl.tensor,
                good_ptr: tl.tensor, step: tl.tensor, v: tl.tensor, rows: tl.tensor, BOUND: tl.constexpr,
                SHARE: tl.constexpr, FLOOR: tl.constexpr, PARTS: tl.constexpr, PAD: tl.constexpr,
                PART: tl.constexpr) -> None:
    """One row: which part, by the parts' tallies, and which token in it, by its logits.

    Of tokens on the bound the first are kept, as many as a stable sort keeps. SHARE: there is a top-p.
    """
    row = tl.program_id(0)
    warm = tl.load(warm_ptr + row).to(tl.float32)
    peak, chosen, good = peak_of(value_ptr, id_ptr, finite_ptr, row, PARTS, PAD)
    if warm > 0:
        bound, floor = _limits(bound_ptr, min_ptr, row, BOUND, FLOOR)
        rp = tl.arange(0, PAD)
        tally_at, in_row = tally_ptr + row * PARTS + rp, rp < PARTS
        each = tl.where(bound >= floor, tl.exp(bound), 0.0)
        equal = tl.load(tally_at + 2 * rows * PARTS, mask=in_row, other=0.0)
        earlier = tl.cumsum(equal, 0) - equal
        limit = tl.full([], INFINITY, tl.float32)
        if SHARE:
            above = tl.sum(tl.load(tally_at, mask=in_row, other=0.0))
            # of r tokens on the bound the last is kept if what comes before is less than the share
            limit = tl.maximum(tl.ceil((tl.load(total_ptr + row) - above) / tl.exp(bound)), 1.0)
        kept = tl.minimum(tl.maximum(limit - earlier, 0.0), equal)
        weight = tl.load(tally_at + rows * PARTS, mask=in_row, other=0.0) + kept * each
        reach = tl.cumsum(weight, 0)
        aim = tl.rand(tl.load(seed_ptr + row), tl.load(step_ptr + row)) * tl.sum(weight)
        part = _first(reach > aim, weight > 0, rp, PAD)
        aim -= tl.sum(tl.where(rp == part, reach - weight, 0.0))
        rv = tl.arange(0, PART)
        ids = part * PART + rv
        x = tl.load(x_ptr + row.to(tl.int64) * step + ids, mask=ids < v, other=-INFINITY).to(tl.float32)
        score = scored(x, peak, warm)
        tie = tl.where((score == bound) & (ids < v), 1.0, 0.0)
        rank = tl.sum(tl.where(rp == part, earlier, 0.0)) + tl.cumsum(tie, 0) - tie
        survives = (score >= floor) & ((score > bound) | ((tie > 0) & (rank < limit)))
        weight = tl.where(survives, tl.exp(score), 0.0)
        at = part * PART + _first(tl.cumsum(weight, 0) > aim, weight > 0, rv, PART)
        # where logits aren't finite nothing may be left
        chosen = tl.where(tl.sum(weight) > 0, at, chosen)
    tl.store(out_ptr + row, chosen.to(tl.int64))
    tl.store(good_ptr + row, good)


@triton.jit
def _first(reached: tl.tensor, possible: tl.tensor, places: tl.tensor, END: tl.constexpr) -> tl.tensor:
    """The first that is possible and reached; where rounding leaves none, the last that is possible."""
    first = tl.min(tl.where(reached & possible, places, END))
    return tl.minimum(first, tl.max(tl.where(possible, places, 0)))


def choose(logits: torch.Tensor, temperature: torch.Tensor, seed: torch.Tensor, step: torch.Tensor,
           top_k: torch.Tensor | None = None, top_p: torch.Tensor | None = None,
           min_p: torch.Tensor | None = None,
           out: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The next token of every row, drawn from what temperature, top-k, top-p and min-p leave, in this order.

    A token is excluded if its score is below the k-th largest (equals of that are kept); if those before it
    in a stable descending order together have at least ``top_p`` of what is left; if its probability is below
    ``min_p`` of the largest. Probabilities are sums in float32: a token may be on the other side of such a
    bound than by another order of summation where it lies within rounding of it.

    Args:
        logits: ``[B, V]``, bfloat16, float16 or float32; rows may be apart.
        temperature: ``[B]``, floating; 0: the most likely, the lowest id of equals.
        seed: int64 ``[B]``, not negative.
        step: int64 or int32 ``[B]``: of the row's own generator (Philox,
            https://doi.org/10.1145/2063384.2063405) the number of that step.
        top_k: integers ``[B]``, 0: all; ``None``: no row has it, and the launches are spared.
        top_p: floating ``[B]``, 1: all; ``None`` likewise.
        min_p: floating ``[B]``, 0: all; ``None`` likewise.
        out: int64 ``[B]``, contiguous: where the ids are written.

    Returns:
        As :func:`argmax`.

    Raises:
        ValueError: another shape or dtype.
    """
    shape = logits.shape[:1]
    if any(setting is not None and setting.shape != shape
           for setting in (temperature, seed, step, top_k, top_p, min_p)):
        raise ValueError(f"of every setting there must be one for each of {shape[0]} rows")
    logits, out, good = checked(logits, out)
    (b, v), apart = logits.shape, logits.stride(0)
    if not b:
        return out, good
    c = cut(v)
    maxima = peaks(logits, c)
    bound, total = bounds(logits, c, maxima[0], temperature, top_k, top_p)
    tally = torch.empty(3, b, c.parts, dtype=torch.float32, device=logits.device)
    about = {"BOUND": bound is not None, "FLOOR": min_p is not None, "PARTS": c.parts, "PAD": c.pad,
             "PART": c.size, "num_warps": WARPS}
    bound, total, least = (maxima[0] if setting is None else setting for setting in (bound, total, min_p))
    tally_kernel[(b, c.parts)](logits, maxima[0], temperature, least, bound, tally, apart, v, b, **about)
    draw_kernel[(b,)](logits, *maxima, temperature, least, bound, total, tally, seed, step, out, good, apart,
                      v, b, SHARE=top_p is not None, **about)
    return out, good
