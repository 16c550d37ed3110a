"""What attention's kernels share: which slots a query sees, and a softmax over pages one after another.

Scores are in powers of two. https://arxiv.org/abs/1805.02867, https://arxiv.org/abs/2205.14135
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantkit_kernels.triton.cache import border


@triton.jit
def spans(at: tl.tensor, window: tl.tensor, limit: tl.tensor, sinks: tl.tensor) -> tl.tensor:
    """Where slots' numbers are their positions: pages that queries at positions ``at`` and above may see,
    those in ``[begin, middle)`` and from ``after`` on."""
    begin = tl.maximum(at - window + 1, 0) // 64
    middle = tl.maximum((sinks + 63) // 64, begin)
    return begin, middle, tl.maximum(tl.maximum(at - limit + 1, 0) // 64, middle)


@triton.jit
def at_or_after(page: tl.tensor, begin: tl.tensor, middle: tl.tensor, after: tl.tensor) -> tl.tensor:
    """The first of :func:`spans` that isn't before a page."""
    return tl.where(page < middle, tl.maximum(page, begin), tl.maximum(page, after))


@triton.jit
def walk(begin: tl.tensor, end: tl.tensor, length: tl.tensor, query: tl.tensor, window: tl.tensor,
         limit: tl.tensor, sinks: tl.tensor, residual_length: tl.tensor, first: tl.tensor,
         HAS_RESIDUAL: tl.constexpr, LIMITED: tl.constexpr, PLACED: tl.constexpr) -> tl.tensor:
    """What one query reads of pages ``[begin, end)``: how many wait for ever, where codes end, and the first
    that is read of all, and of those behind the codes."""
    fixed, coded = 0, end
    if HAS_RESIDUAL:
        fixed, coded = first // 64, border(length, residual_length, first) // 64
    low, rest = begin, tl.maximum(begin, coded)
    if LIMITED and not PLACED:
        a, b, c = spans(query, window, limit, sinks)
        low, rest = at_or_after(begin, a, b, c), at_or_after(rest, a, b, c)
    return fixed, coded, low, rest


@triton.jit
def residual_page(table: tl.tensor, j: tl.tensor, early: tl.tensor, low: tl.tensor, rest: tl.tensor,
                  fixed: tl.tensor, start: tl.tensor) -> tl.tensor:
    """The ``j``-th page of vectors that is read, ``early`` of them from ``low`` on and others from ``rest``:
    its place in the sequence, and its number in a head's ``table``, where the one at ``start`` follows the
    ``fixed`` first."""
    i = tl.where(j < early, low + j, rest + j - early)
    page = tl.load(table + tl.where(i < fixed, i, i - start + fixed))
    return i, page.to(tl.int64)


@triton.jit
def visible(at: tl.tensor, query: tl.tensor, window: tl.tensor, limit: tl.tensor,
            sinks: tl.tensor) -> tl.tensor:
    """Whether a query at a position sees what stands at another, before it."""
    return (at > query - window) & ((at > query - limit) | (at < sinks))


@triton.jit
def scaled(s: tl.tensor, factor: tl.tensor, cap: tl.tensor, CAPPED: tl.constexpr) -> tl.tensor:
    """``s · factor``; with a cap ``cap · tanh(s · factor · ln 2 / 2)``."""
    s *= factor
    if CAPPED:
        s = cap * (1.0 - 2.0 / (1.0 + tl.exp2(s)))
    return s


@triton.jit
def update(s: tl.tensor, maximum: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Another page's scores ``[M, 64]``, −∞ where they aren't seen: weights, what sums so far shrink by, and
    the new maximum and total. A row that sees nothing of a page stays as it is, to the bit."""
    higher = tl.maximum(maximum, tl.max(s, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    p = tl.exp2(s - base[:, None])
    shrink = tl.exp2(maximum - base)
    return p, shrink, higher, total * shrink + tl.sum(p, 1)
