"""Scores of a page's keys, and sums of its values by weights: the products of attention, for every coding.

``ptr`` are codes, of q's dtype if plain, else int32 words; ``scale`` and ``shift`` are int32 words of two
bfloat16. KIND, BITS and CENTERED are those of a :class:`~quantkit_kernels.triton.cache.SideLayout`; D is the
head dimension, DP the power of two above it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantkit_kernels.triton.fragment import halves
from quantkit_kernels.triton.kv_decode import (
    fields,
    level_size,
    lift,
    mix,
    numbers,
    on_grid,
    pairs_of,
    scales,
    words,
)


@triton.constexpr_function
def threads_words(w: int) -> tuple[int, int]:
    """The threads that share a slot's words, and the words that a thread reads side by side."""
    return min(4, w), min(4, w // min(4, w))


@triton.jit
def key_dims(KIND: tl.constexpr, BITS: tl.constexpr, DP: tl.constexpr) -> tl.tensor:
    """Dimensions ``[DP]`` in the order in which :func:`scores` sums over them."""
    r = tl.arange(0, DP)
    if KIND != "plain":
        J: tl.constexpr = fields(BITS)
        T: tl.constexpr = threads_words(words(BITS, DP))[0]
        N: tl.constexpr = threads_words(words(BITS, DP))[1]
        word = r // (2 * T * J * N) * (T * N) + r // 4 % T * N + r // (2 * T * J) % N
        r = word * (2 * J) + r // (4 * T) % (J // 2) * 2 + r // 2 % 2 + r % 2 * J
    return r


@triton.jit
def natural(acc: tl.tensor, KIND: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr) -> tl.tensor:
    """The result of :func:`add_values` → its dimensions in their order, and its true size; D: q's dtype."""
    if KIND != "plain":
        M: tl.constexpr = acc.shape[0]
        DP: tl.constexpr = acc.shape[1]
        J: tl.constexpr = fields(BITS)
        acc = acc.reshape(M, 2 * J, DP // (2 * J)).trans(0, 2, 1).reshape(M, DP) * (1.0 / lift(KIND, D))
    return acc


@triton.jit
def _by_dim(x: tl.tensor) -> tl.tensor:
    """``[W, …, J, e]`` → as :func:`key_dims`: ``[DP]`` of ``[W, J, 2]``, ``[DP, B]`` of ``[W, B, J, 2]``."""
    W: tl.constexpr = x.shape[0]
    T: tl.constexpr = threads_words(W)[0]
    N: tl.constexpr = threads_words(W)[1]
    if len(x.shape) == 3:
        J: tl.constexpr = x.shape[1]
        x = x.reshape(W // (T * N), T, N, J // 2, 2, 2).trans(0, 2, 3, 1, 4, 5)
        x = x.reshape(2 * W * J)
    else:
        B: tl.constexpr = x.shape[1]
        JB: tl.constexpr = x.shape[2]
        x = x.reshape(W // (T * N), T, N, B, JB // 2, 2, 2).trans(0, 2, 4, 1, 5, 6, 3)
        x = x.reshape(2 * W * JB, B)
    return x


@triton.jit
def _keys(ptr: tl.tensor, scale: tl.tensor, shift: tl.tensor, page: tl.tensor,
          KIND: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DT: tl.constexpr,
          ASM: tl.constexpr) -> tl.tensor:
    """``[DP, 64]``, without the scales that vectors have."""
    rs = tl.arange(0, 64)[None, :]
    if KIND == "plain":
        rd = tl.arange(0, DP)[:, None]
        at = ptr + page * (64 * D) + rs * D + rd
        out = tl.load(at) if D == DP else tl.load(at, mask=rd < D, other=0.0)
    else:
        J: tl.constexpr = fields(BITS)
        W: tl.constexpr = words(BITS, DP)
        EACH: tl.constexpr = D * BITS // 32
        rw = tl.arange(0, W)[:, None]
        at = ptr + page * (64 * EACH) + rs * EACH
        x = tl.load(at + rw) if D == DP else tl.load(at + rw, mask=rw < words(BITS, D), other=0)
        y = x
        if BITS == 3:
            rh = tl.arange(0, W // 2)[:, None]
            y = tl.load(at + words(BITS, D) + rh, mask=rh < D // 32, other=0)
            y = tl.join(y & 0xFFFF, (y >> 16) & 0xFFFF).trans(0, 2, 1).reshape(W, 64)
            y = (y & 0xFF) | ((y >> 8) << 16)
        pairs = pairs_of(x, y, KIND, BITS)
        if KIND == "channel":
            s, low = _by_field(scale, page, J, W, D, DP, ASM), _by_field(shift, page, J, W, D, DP, ASM)
            low_numbers, high_numbers = on_grid(pairs.reshape(W, 2, 32, J), s, low, BITS, DT, ASM)
            both = tl.join(low_numbers, high_numbers).reshape(W, 64, J, 2)
        else:
            low_numbers, high_numbers = numbers(pairs, KIND, BITS, DT, ASM)
            both = tl.join(low_numbers, high_numbers)
        out = _by_dim(both)
    return out


@triton.jit
def _by_field(ptr: tl.tensor, page: tl.tensor, J: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
              DP: tl.constexpr, ASM: tl.constexpr) -> tl.tensor:
    """Grids of a page's two halves, ``[2, D]`` bfloat16 → pairs ``[W, 2, 1, J]``."""
    if D == DP:
        x = tl.load(ptr + page * D + tl.arange(0, DP))
    else:
        r = tl.arange(0, DP)
        x = tl.load(ptr + page * D + r // (DP // 2) * (D // 2) + r % (DP // 2), mask=r % (DP // 2) < D // 2,
                    other=0)
    a, b = tl.split(x.reshape(2, W, 2, J // 2).trans(1, 0, 3, 2))
    low, high = mix(a, b, ASM)
    return tl.join(low, high).reshape(W, 2, 1, J)


@triton.jit
def _mean(ptr: tl.tensor, page: tl.tensor, BITS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
          DT: tl.constexpr) -> tl.tensor:
    """A page's mean ``[DP]``, as :func:`key_dims`."""
    J: tl.constexpr = fields(BITS)
    W: tl.constexpr = words(BITS, DP)
    at = tl.arange(0, DP // 2)
    at += page * (D // 2)
    x = tl.load(ptr + at) if D == DP else tl.load(ptr + at, mask=at < (page + 1) * (D // 2), other=0)
    low, high = halves(x, tl.bfloat16)
    x = tl.join(low.to(DT), high.to(DT)).reshape(W, 2, J).trans(0, 2, 1)
    return _by_dim(x)


@triton.jit
def scores(q: tl.tensor, ptr: tl.tensor, scale: tl.tensor, shift: tl.tensor, page: tl.tensor,
           KIND: tl.constexpr, BITS: tl.constexpr, CENTERED: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
           ASM: tl.constexpr) -> tl.tensor:
    """q ``[M, DP]``, as :func:`key_dims` → ``q kᵀ [M, 64]``, float32."""
    s = tl.dot(q, _keys(ptr, scale, shift, page, KIND, BITS, D, DP, q.dtype, ASM),
               input_precision="ieee")
    if KIND == "int8" or KIND == "fp8":
        s *= scales(scale, page)[None, :]
    if KIND == "hadamard":
        s *= scales(scale, page)[None, :] * level_size(BITS, q.dtype, ASM)
        if CENTERED:
            mean = _mean(shift, page, BITS, D, DP, q.dtype)
            s = tl.dot(q, tl.broadcast_to(mean[:, None], (DP, 64)), s, input_precision="ieee")
    return s


@triton.jit
def _by_word(ptr: tl.tensor, page: tl.tensor, valid: tl.tensor, W: tl.constexpr, D: tl.constexpr,
             DP: tl.constexpr, ASM: tl.constexpr) -> tl.tensor:
    """Grids of each 32 dimensions of a token, ``[64, D / 32]`` bfloat16 → pairs ``[32, W]`` of two slots; 0
    where they aren't held, which may be NaN."""
    N: tl.constexpr = DP // 32
    if N == 1:
        x = tl.load(ptr + page * 32 + tl.arange(0, 32))
        even, odd = tl.split(valid.to(tl.int32).reshape(32, 2))
        out = ((x & 0xFFFF) * even | (x & -65536) * odd)[:, None]
    elif D == DP:
        # where they aren't held isn't loaded: a selection afterwards would be one for each word of codes
        rs, rn = tl.arange(0, 64)[:, None], tl.arange(0, N // 2)[None, :]
        x = tl.load(ptr + page * 32 * N + rs * (N // 2) + rn, mask=valid[:, None], other=0)
        a, b = tl.split(x.reshape(32, 2, N // 2).trans(0, 2, 1))
        low, high = mix(a, b, ASM)
        out = tl.join(low, high).reshape(32, N)
    else:  # an odd number of groups
        rs, rn = tl.arange(0, 64)[:, None], tl.arange(0, N)[None, :]
        to16 = ptr.to(tl.pointer_type(tl.int16), bitcast=True) + page * (64 * (D // 32))
        x = tl.load(to16 + rs * (D // 32) + rn, mask=valid[:, None] & (rn < D // 32), other=0).to(tl.int32)
        a, b = tl.split(x.reshape(32, 2, N).trans(0, 2, 1))
        out = (a & 0xFFFF) | (b << 16)
    return tl.broadcast_to(out[:, :, None], (32, N, W // N)).reshape(32, W)


@triton.jit
def _two_slots(ptr: tl.tensor, EACH: tl.constexpr, COUNT: tl.constexpr, W: tl.constexpr) -> tl.tensor:
    """W words of even and of odd slots, EACH apart, 0 behind the first COUNT: two ``[32, W]``."""
    # loaded at once: from two loads Triton makes copies of 4 bytes
    rs, rw = tl.arange(0, 64)[:, None], tl.arange(0, W)[None, :]
    at = ptr + rs * EACH + rw
    x = tl.load(at) if COUNT == W else tl.load(at, mask=rw < COUNT, other=0)
    return tl.split(x.reshape(32, 2, W).trans(0, 2, 1))


@triton.jit
def add_values(acc: tl.tensor, p: tl.tensor, ptr: tl.tensor, scale: tl.tensor, shift: tl.tensor,
               page: tl.tensor, valid: tl.tensor, KIND: tl.constexpr, BITS: tl.constexpr,
               D: tl.constexpr, DP: tl.constexpr, DT: tl.constexpr, ASM: tl.constexpr) -> tl.tensor:
    """``acc + p v``: p float32 ``[M, 64]``, 0 where slots aren't held, ``[64]``; acc float32 ``[M, DP]``."""
    if KIND == "plain":
        rs, rd = tl.arange(0, 64)[:, None], tl.arange(0, DP)[None, :]
        # what was never written may be NaN, and NaN times 0 is NaN
        v = tl.load(ptr + page * (64 * D) + rs * D + rd,
                    mask=valid[:, None] if D == DP else valid[:, None] & (rd < D), other=0.0)
    else:
        W: tl.constexpr = words(BITS, DP)
        EACH: tl.constexpr = D * BITS // 32
        at = ptr + page * (64 * EACH)
        even, odd = _two_slots(at, EACH, words(BITS, D), W)
        x0, x1 = mix(even, odd, ASM)
        y0, y1 = x0, x1
        if BITS == 3:
            even, odd = _two_slots(at + words(BITS, D), EACH, D // 32, W // 2)
            even = tl.join(even & 0xFFFF, (even >> 16) & 0xFFFF).reshape(32, W)
            odd = tl.join(odd & 0xFFFF, (odd >> 16) & 0xFFFF).reshape(32, W)
            y0 = even | (odd << 16)
            y1 = y0 >> 8
        pairs = tl.join(pairs_of(x0, y0, KIND, BITS), pairs_of(x1, y1, KIND, BITS))  # [32, W, J, half]
        if KIND == "token":
            s, low = _by_word(scale, page, valid, W, D, DP, ASM), _by_word(shift, page, valid, W, D, DP, ASM)
            a, b = on_grid(pairs, s[:, :, None, None], low[:, :, None, None], BITS, DT, ASM)
        else:
            a, b = numbers(pairs, KIND, BITS, DT, ASM)
            s = scales(scale, page)
            if KIND == "hadamard":
                s *= level_size(BITS, DT, ASM)
            p = p * tl.where(valid, s * lift(KIND, DT), 0.0)[None, :]
        v = tl.join(a, b).trans(0, 4, 3, 2, 1).reshape(64, DP)
    return tl.dot(p.to(DT), v, acc, input_precision="ieee")


@triton.jit
def vector_scores(q: tl.tensor, ptr: tl.tensor, page: tl.tensor, D: tl.constexpr,
                  DP: tl.constexpr) -> tl.tensor:
    """The same of vectors that wait, q's dimensions in their order."""
    return tl.dot(q, _keys(ptr, ptr, ptr, page, "plain", 16, D, DP, q.dtype, False), input_precision="ieee")


@triton.jit
def add_vectors(acc: tl.tensor, p: tl.tensor, ptr: tl.tensor, page: tl.tensor, valid: tl.tensor,
                KIND: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
                DT: tl.constexpr) -> tl.tensor:
    """:func:`add_values` of vectors that wait, in the order and size that acc has for that coding."""
    rs, rd = tl.arange(0, 64)[:, None], tl.arange(0, DP)[None, :]
    v = tl.load(ptr + page * (64 * D) + rs * D + rd,
                mask=valid[:, None] if D == DP else valid[:, None] & (rd < D), other=0.0)
    if KIND != "plain":
        J: tl.constexpr = fields(BITS)
        v = v.reshape(64, DP // (2 * J), 2 * J).trans(0, 2, 1).reshape(64, DP)
        p = p * lift(KIND, DT)
    return tl.dot(p.to(DT), v, acc, input_precision="ieee")
