"""What follows a finished sum: scales, bias, gate, residual; rounded once, when the result is stored."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activated(gate: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """``silu`` or ``gelu_tanh`` of float32; finite for every finite gate.

    ``(1 + tanh(u)) / 2`` is ``sigmoid(2 u)``, which loses nothing where tanh is near −1.
    """
    inner = gate
    if KIND == "gelu_tanh":
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate * tl.sigmoid(inner)


@triton.jit
def finish(total: tl.tensor, first: tl.tensor, rm: tl.tensor, t_ptr: tl.tensor, s_ptr: tl.tensor,
           b_ptr: tl.tensor, r_ptr: tl.tensor, y_ptr: tl.tensor, m: tl.tensor, n: tl.tensor, r_row: tl.tensor,
           y_row: tl.tensor, GATED: tl.constexpr) -> None:
    """Sums ``total [N, M]`` of the weight's rows from ``first`` on by rows ``rm`` of x → y, M by n.

    t float32 ``[m]``: scales of x's rows; s float32: of the weight's; b: bias ``[n]``, or with GATED
    ``[2 n]``, gate's first; r: residual, rows r_row apart. Each of them may be ``None``. With GATED y is
    ``act(gate) · up``.
    """
    N: tl.constexpr = total.shape[0]
    M: tl.constexpr = total.shape[1]
    v = total.to(tl.float32)
    if t_ptr is not None:
        v *= tl.load(t_ptr + rm, mask=rm < m, other=0.0)[None, :]
    if s_ptr is not None:
        v *= tl.load(s_ptr + first + tl.arange(0, N))[:, None]
    if GATED is not None:
        gate, up = tl.split(v.reshape(N // 16, 2, 8, M).trans(0, 2, 3, 1))
        gate, up = gate.reshape(N // 2, M), up.reshape(N // 2, M)
        rn = first // 2 + tl.arange(0, N // 2)
        if b_ptr is not None:
            gate += tl.load(b_ptr + rn, mask=rn < n, other=0.0).to(tl.float32)[:, None]
            up += tl.load(b_ptr + n + rn, mask=rn < n, other=0.0).to(tl.float32)[:, None]
        v = activated(gate, GATED) * up
    else:
        rn = first + tl.arange(0, N)
        if b_ptr is not None:
            v += tl.load(b_ptr + rn, mask=rn < n, other=0.0).to(tl.float32)[:, None]
    seen = (rm < m)[None, :] & (rn < n)[:, None]
    row = rm.to(tl.int64)[None, :]
    if r_ptr is not None:
        v += tl.load(r_ptr + row * r_row + rn[:, None], mask=seen, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * y_row + rn[:, None], v.to(y_ptr.dtype.element_ty), mask=seen)
