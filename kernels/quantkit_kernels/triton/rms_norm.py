"""Root-mean-square normalization, with the residual added on the way. https://arxiv.org/abs/1910.07467"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LONGEST = 32768
"""Numbers in a row: a row is one program's, in registers."""


@triton.jit
def rms_norm_kernel(x_ptr: tl.tensor, r_ptr: tl.tensor, w_ptr: tl.tensor, y_ptr: tl.tensor, h_ptr: tl.tensor,
                    eps: tl.tensor, N: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr) -> None:
    """One row: x, r, y, h ``[m, N]``, w ``[N]``."""
    row = tl.program_id(0).to(tl.int64) * N
    rn = tl.arange(0, BLOCK)
    seen = rn < N
    x = tl.load(x_ptr + row + rn, mask=seen, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(r_ptr + row + rn, mask=seen, other=0.0).to(tl.float32)
        h = x.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + row + rn, h, mask=seen)
        x = h.to(tl.float32)
    normal = x * tl.rsqrt(tl.sum(x * x) / N + eps)
    w = tl.load(w_ptr + rn, mask=seen, other=0.0).to(tl.float32)
    y = normal.to(y_ptr.dtype.element_ty).to(tl.float32) * w
    tl.store(y_ptr + row + rn, y.to(y_ptr.dtype.element_ty), mask=seen)


def constants(n: int) -> dict[str, int]:
    """Compile-time arguments and options for rows of n numbers."""
    block = triton.next_power_of_2(n)
    return {"N": n, "BLOCK": block, "num_warps": min(16, max(1, block // 1024))}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float,
             residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """``h = x + residual``, ``y = h / sqrt(mean(h²) + eps) * weight``.

    Args:
        x: ``[..., n]``, bfloat16, float16 or float32; n at most 32768.
        weight: ``[n]``.
        eps: added to the mean square.
        residual: like x; ``None``: h is x itself.

    Returns:
        y and h, in x's dtype. h is rounded before it is normalized, and the normalized row before the
        weight multiplies it, as models are trained with; statistics are float32.

    Raises:
        ValueError: shapes don't fit.
    """
    n = x.shape[-1]
    if weight.shape != (n,) or n > LONGEST or (residual is not None and residual.shape != x.shape):
        raise ValueError(f"x {list(x.shape)}, weight {list(weight.shape)} and residual "
                         f"{None if residual is None else list(residual.shape)} don't fit")
    x = x.contiguous()
    y = torch.empty_like(x)
    h = x if residual is None else torch.empty_like(x)
    other = x if residual is None else residual.to(x.dtype).contiguous()
    if x.numel():
        rms_norm_kernel[(x.numel() // n,)](x, other, weight.contiguous(), y, h, eps,
                                          ADD=residual is not None, **constants(n))
    return y, h
