"""Root-mean-square normalization, https://arxiv.org/abs/1910.07467: with the residual added on the way, and
the result rounded to 8 bits, or to 4-bit floats in groups."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quantkit_kernels.triton.dependent import let_next_begin, starts
from quantkit_kernels.triton.levels import LONGEST, QuantizedActivations, constants, empty, to_levels
from quantkit_kernels.triton.token_groups import (
    GroupRounding,
    empty_groups,
    round_and_store,
    round_groups,
)

LONGEST_GROUPED = 16384
"""Numbers in a row that is rounded in groups on the way; longer ones are, after they were stored: registers
wouldn't hold them."""


@triton.jit
def _normal(x_ptr: tl.tensor, r_ptr: tl.tensor, w_ptr: tl.tensor, h_ptr: tl.tensor, eps: tl.tensor,
            row: tl.tensor, N: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """A row of y, in x's dtype, which is 0 beyond its end; h is stored."""
    rn = tl.arange(0, BLOCK)
    seen = rn < N
    x = tl.load(x_ptr + row + rn, mask=seen, other=0.0).to(tl.float32)
    if r_ptr is not None:
        x += tl.load(r_ptr + row + rn, mask=seen, other=0.0).to(tl.float32)
        h = x.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + row + rn, h, mask=seen)
        x = h.to(tl.float32)
    normal = x * tl.rsqrt(tl.sum(x * x) / N + eps)
    w = tl.load(w_ptr + rn, mask=seen, other=0.0).to(tl.float32)
    if w_ptr.dtype.element_ty == x_ptr.dtype.element_ty:
        normal = normal.to(x_ptr.dtype.element_ty).to(tl.float32)
    return (normal * w).to(x_ptr.dtype.element_ty)


@triton.jit
def rms_norm_kernel(x_ptr: tl.tensor, r_ptr: tl.tensor, w_ptr: tl.tensor, y_ptr: tl.tensor, h_ptr: tl.tensor,
                    t_ptr: tl.tensor, eps: tl.tensor, N: tl.constexpr, BLOCK: tl.constexpr,
                    EARLY: tl.constexpr) -> None:
    """One row: x, y ``[m, N]``, w ``[N]``; residual r and sum h like x, or both ``None``.

    With float32 ``t [m]`` y are levels and t their scales.
    """
    if EARLY:
        let_next_begin()
    at = tl.program_id(0).to(tl.int64)
    y = _normal(x_ptr, r_ptr, w_ptr, h_ptr, eps, at * N, N, BLOCK)
    if t_ptr is not None:
        y, scale = to_levels(y.to(tl.float32), y_ptr.dtype.element_ty)
        tl.store(t_ptr + at, scale)
    rn = tl.arange(0, BLOCK)
    tl.store(y_ptr + at * N + rn, y.to(y_ptr.dtype.element_ty), mask=rn < N)


@triton.jit
def rms_norm_groups_kernel(x_ptr: tl.tensor, w_ptr: tl.tensor, f_ptr: tl.tensor, l_ptr: tl.tensor,
                           t_ptr: tl.tensor, eps: tl.tensor, N: tl.constexpr, COLUMNS: tl.constexpr,
                           WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
                           PACKED: tl.constexpr, LEVEL_BITS: tl.constexpr, EARLY: tl.constexpr) -> None:
    """One row, rounded in groups: see :func:`~quantkit_kernels.triton.token_groups.round_groups_kernel`."""
    if EARLY:
        let_next_begin()
    at = tl.program_id(0).to(tl.int64)
    y = _normal(x_ptr, None, w_ptr, None, eps, at * N, N, BLOCK).to(tl.float32)
    round_and_store(y.reshape(BLOCK // GROUP, GROUP), tl.arange(0, BLOCK // GROUP), at, f_ptr, l_ptr, t_ptr,
                    True, N, COLUMNS, WIDTH, PACKED, LEVEL_BITS)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float,
             residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """``h = x + residual``, ``y = h / sqrt(mean(h²) + eps) * weight``.

    Args:
        x: ``[..., n]``, bfloat16, float16 or float32; n at most 32768.
        weight: ``[n]``, x's dtype or float32.
        eps: added to the mean square.
        residual: like x; ``None``: h is x itself.

    Returns:
        y and h, in x's dtype. h is rounded before it is normalized, and the normalized row before a
        weight of x's dtype multiplies it, but not before one of float32 does, as models are trained with;
        statistics are float32.

    Raises:
        ValueError: shapes don't fit.
    """
    _check(x, weight, residual)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y, _launch(x, weight, eps, residual, y, None)


def rms_norm_levels(x: torch.Tensor, weight: torch.Tensor, eps: float, kind: torch.dtype,
                    residual: torch.Tensor | None = None) -> tuple[QuantizedActivations, torch.Tensor]:
    """:func:`rms_norm` of ``[m, n]``, and y rounded by :func:`~quantkit_kernels.triton.levels.quantize`.

    Returns:
        Levels of the y that would have been returned, and h.

    Raises:
        ValueError: shapes don't fit, or there are no levels of that kind.
    """
    _check(x, weight, residual)
    result = empty(x, kind)
    return result, _launch(x, weight, eps, residual, result.values, result.scale)


def rms_norm_groups(x: torch.Tensor, weight: torch.Tensor, eps: float,
                    how: GroupRounding) -> QuantizedActivations:
    """:func:`rms_norm` of ``[m, n]`` without a residual, and y rounded by
    :func:`~quantkit_kernels.triton.token_groups.round_groups`.

    Raises:
        ValueError: shapes don't fit, or there are no such groups.
    """
    if x.shape[-1] > LONGEST_GROUPED:
        return round_groups(rms_norm(x, weight, eps)[0], how)
    _check(x, weight, None)
    result = empty_groups(x, how)
    if x.shape[0]:
        rms_norm_groups_kernel[(x.shape[0],)](
            x.contiguous(), weight.contiguous(), how.factor, result.values, result.scale, eps,
            **group_constants(x.shape[1], how, starts(x.device)))
    return result


def group_constants(n: int, how: GroupRounding, early: bool) -> dict[str, int | bool]:
    """Compile-time arguments and options for rows of n numbers; ``early``: see
    :func:`~quantkit_kernels.triton.dependent.starts`."""
    columns = how.columns(n)
    return {**constants(max(columns, how.group), early), "N": n, "COLUMNS": columns,
            "WIDTH": how.width(n), "GROUP": how.group, "PACKED": how.packed > 0,
            "LEVEL_BITS": how.bits}


def _check(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> None:
    n = x.shape[-1]
    if weight.shape != (n,) or n > LONGEST or (residual is not None and residual.shape != x.shape):
        raise ValueError(f"x {list(x.shape)}, weight {list(weight.shape)} and residual "
                         f"{None if residual is None else list(residual.shape)} don't fit")


def _launch(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, y: torch.Tensor,
            scale: torch.Tensor | None) -> torch.Tensor:
    x = x.contiguous()
    h = x if residual is None else torch.empty_like(x)
    other = None if residual is None else residual.to(x.dtype).contiguous()
    if x.numel():
        rms_norm_kernel[(x.numel() // x.shape[-1],)](
            x, other, weight.contiguous(), y, None if residual is None else h, scale, eps,
            **constants(x.shape[-1], starts(x.device)))
    return h
