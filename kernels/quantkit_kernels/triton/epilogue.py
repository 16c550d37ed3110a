"""The epilogue of a matrix product: segments of K that other programs summed; then scales, bias, gate and
residual, rounded once, when it is stored."""

from __future__ import annotations

import triton
import triton.language as tl

from quantkit_kernels.triton.arrivals import is_last


@triton.jit
def activated(gate: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Return ``silu`` or ``gelu_tanh`` of a float32 gate; finite for every finite gate.

    ``(1 + tanh(u)) / 2`` is computed as ``sigmoid(2 u)``, which loses no precision where tanh is near −1.
    """
    inner = gate
    if KIND == "gelu_tanh":
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate * tl.sigmoid(inner)


@triton.jit
def opened(gate: tl.tensor, up: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """``act(gate) · up`` of float32. A number is the limit of gpt-oss's clamped SiLU, which is
    ``g · sigmoid(1.702 g) · (u + 1)`` with ``g = min(gate, limit)`` and ``u`` as ``up``, but within the limit
    on both sides: https://arxiv.org/abs/2508.10925"""
    if KIND == "silu" or KIND == "gelu_tanh":
        v = activated(gate, KIND) * up
    else:
        g = tl.minimum(gate, KIND)
        v = g * tl.sigmoid(1.702 * g) * (tl.maximum(tl.minimum(up, KIND), -KIND) + 1.0)
    return v


@triton.jit
def finish(total: tl.tensor, first: tl.tensor, inner: tl.tensor, rm: tl.tensor, t_ptr: tl.tensor,
           s_ptr: tl.tensor, b_ptr: tl.tensor, r_ptr: tl.tensor, y_ptr: tl.tensor, m: tl.tensor,
           n: tl.tensor, r_row: tl.tensor, y_row: tl.tensor, GATED: tl.constexpr) -> None:
    """Finish the sums ``total [N, M]`` and store y, M by n.

    The sums are of the weight's rows ``first + inner`` by rows ``rm`` of x. t are float32 scales ``[m]`` of
    x's rows; s are float32 scales of the weight's rows; b is the bias ``[n]``, or with GATED ``[2 n]`` with
    that of the gate first; r is the residual, with rows r_row apart. Each of them may be ``None``. With GATED
    y is what a gate opens: see :func:`opened`.
    """
    N: tl.constexpr = total.shape[0]
    M: tl.constexpr = total.shape[1]
    v = total.to(tl.float32)
    if t_ptr is not None:
        v *= tl.load(t_ptr + rm, mask=rm < m, other=0.0)[None, :]
    if s_ptr is not None:
        v *= tl.load(s_ptr + first + inner)[:, None]
    if GATED is not None:
        gate, up = tl.split(v.reshape(N // 16, 2, 8, M).trans(0, 2, 3, 1))
        gate, up = gate.reshape(N // 2, M), up.reshape(N // 2, M)
        rn = first // 2 + tl.arange(0, N // 2)
        if b_ptr is not None:
            gate += tl.load(b_ptr + rn, mask=rn < n, other=0.0).to(tl.float32)[:, None]
            up += tl.load(b_ptr + n + rn, mask=rn < n, other=0.0).to(tl.float32)[:, None]
        v = opened(gate, up, GATED)
    else:
        rn = first + inner
        if b_ptr is not None:
            v += tl.load(b_ptr + rn, mask=rn < n, other=0.0).to(tl.float32)[:, None]
    seen = (rm < m)[None, :] & (rn < n)[:, None]
    row = rm.to(tl.int64)[None, :]
    if r_ptr is not None:
        v += tl.load(r_ptr + row * r_row + rn[:, None], mask=seen, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * y_row + rn[:, None], v.to(y_ptr.dtype.element_ty), mask=seen)


@triton.jit
def finish_segments(total: tl.tensor, part_ptr: tl.tensor, count_ptr: tl.tensor, first: tl.tensor,
                    inner: tl.tensor, t_ptr: tl.tensor, s_ptr: tl.tensor, b_ptr: tl.tensor, r_ptr: tl.tensor,
                    y_ptr: tl.tensor, m: tl.tensor, n: tl.tensor, r_row: tl.tensor, y_row: tl.tensor,
                    NPAD: tl.constexpr, SEGMENTS: tl.constexpr, GATED: tl.constexpr, CDNA: tl.constexpr
                    ) -> None:
    """Store the sums ``total [N, M]`` of one segment, ``program_id(2)``, in ``part [SEGMENTS, m, NPAD]``. The
    last program of a tile, which is M rows ``program_id(1)`` of x, adds all segments in order and does the
    rest: see :func:`finish`. It takes a few rows and segments at a time, so that the loop before this needn't
    share the GPU with fewer programs for want of registers."""
    M: tl.constexpr = total.shape[1]
    ROWS: tl.constexpr = 8 if M < 64 else 16
    AT_ONCE: tl.constexpr = 8 if SEGMENTS > 8 else SEGMENTS
    begin = tl.program_id(1) * M
    rm = begin + tl.arange(0, M)
    part_ptr += (first + inner)[:, None]
    segment = m.to(tl.int64) * NPAD
    tl.store(part_ptr + (tl.program_id(2) * segment + rm.to(tl.int64)[None, :] * NPAD), total,
             mask=(rm < m)[None, :])
    if is_last(count_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), SEGMENTS, CDNA):
        for row in range(begin, tl.minimum(begin + M, m), ROWS):
            rows = row + tl.arange(0, ROWS)
            here = part_ptr + rows.to(tl.int64)[None, :] * NPAD
            sums = tl.zeros([total.shape[0], ROWS], total.dtype)
            for i in range(0, SEGMENTS, AT_ONCE):
                for j in tl.static_range(AT_ONCE):
                    seen = (rows < m)[None, :] & (i + j < SEGMENTS)
                    sums += tl.load(here + (i + j) * segment, mask=seen, other=0)
            finish(sums, first, inner, rows, t_ptr, s_ptr, b_ptr, r_ptr, y_ptr, m, n, r_row, y_row, GATED)
