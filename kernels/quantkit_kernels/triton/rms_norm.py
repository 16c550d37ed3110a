"""Root-mean-square normalization, https://arxiv.org/abs/1910.07467: with the residual added on the way, to
what was normalized itself where a layer ends with a norm, and the result rounded to 8 bits, or to 4-bit
floats in groups."""

from __future__ import annotations

from typing import Any

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
def _scaled(x: tl.tensor, w_ptr: tl.tensor, eps: tl.tensor, DTYPE: tl.constexpr, N: tl.constexpr,
            BLOCK: tl.constexpr) -> tl.tensor:
    """A row's norm times a weight, both rounded as :func:`rms_norm` says; float32 like x."""
    rn = tl.arange(0, BLOCK)
    normal = x * tl.rsqrt(tl.sum(x * x) / N + eps)
    w = tl.load(w_ptr + rn, mask=rn < N, other=0.0).to(tl.float32)
    if w_ptr.dtype.element_ty == DTYPE:
        normal = normal.to(DTYPE).to(tl.float32)
    return (normal * w).to(DTYPE).to(tl.float32)


@triton.jit
def _normal(x_ptr: tl.tensor, v_ptr: tl.tensor, r_ptr: tl.tensor, w_ptr: tl.tensor, h_ptr: tl.tensor,
            eps: tl.tensor, row: tl.tensor, N: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """A row of y, float32 but rounded to x's dtype, which is 0 beyond its end; h is stored."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    rn = tl.arange(0, BLOCK)
    seen = rn < N
    x = tl.load(x_ptr + row + rn, mask=seen, other=0.0).to(tl.float32)
    if v_ptr is not None:
        x = _scaled(x, v_ptr, eps, DTYPE, N, BLOCK)
    if r_ptr is not None:
        x += tl.load(r_ptr + row + rn, mask=seen, other=0.0).to(tl.float32)
        h = x.to(DTYPE)
        tl.store(h_ptr + row + rn, h, mask=seen)
        x = h.to(tl.float32)
    return _scaled(x, w_ptr, eps, DTYPE, N, BLOCK)


@triton.jit
def rms_norm_kernel(x_ptr: tl.tensor, v_ptr: tl.tensor, r_ptr: tl.tensor, w_ptr: tl.tensor, h_ptr: tl.tensor,
                    y_ptr: tl.tensor, t_ptr: tl.tensor, eps: tl.tensor, N: tl.constexpr, BLOCK: tl.constexpr,
                    EARLY: tl.constexpr) -> None:
    """One row: x, y ``[m, N]``, w ``[N]``; residual r and sum h like x, or both ``None``; with v, like w, the
    residual is added to the norm of x.

    With float32 ``t [m]`` y are levels and t their scales.
    """
    if EARLY:
        let_next_begin()
    at = tl.program_id(0).to(tl.int64)
    y = _normal(x_ptr, v_ptr, r_ptr, w_ptr, h_ptr, eps, at * N, N, BLOCK)
    if t_ptr is not None:
        y, scale = to_levels(y, y_ptr.dtype.element_ty)
        tl.store(t_ptr + at, scale)
    rn = tl.arange(0, BLOCK)
    tl.store(y_ptr + at * N + rn, y.to(y_ptr.dtype.element_ty), mask=rn < N)


@triton.jit
def rms_norm_groups_kernel(x_ptr: tl.tensor, v_ptr: tl.tensor, r_ptr: tl.tensor, w_ptr: tl.tensor,
                           h_ptr: tl.tensor, f_ptr: tl.tensor, l_ptr: tl.tensor, t_ptr: tl.tensor,
                           eps: tl.tensor, N: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
                           GROUP: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr,
                           LEVEL_BITS: tl.constexpr, EARLY: tl.constexpr) -> None:
    """One row, as in :func:`rms_norm_kernel`, rounded in groups: see
    :func:`~quantkit_kernels.triton.token_groups.round_groups_kernel`."""
    if EARLY:
        let_next_begin()
    at = tl.program_id(0).to(tl.int64)
    y = _normal(x_ptr, v_ptr, r_ptr, w_ptr, h_ptr, eps, at * N, N, BLOCK)
    round_and_store(y.reshape(BLOCK // GROUP, GROUP), tl.arange(0, BLOCK // GROUP), at, f_ptr, l_ptr, t_ptr,
                    True, N, COLUMNS, WIDTH, PACKED, LEVEL_BITS)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None,
             before: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """``h = x + residual``, ``y = h / sqrt(mean(h²) + eps) * weight``.

    Args:
        x: ``[..., n]``, bfloat16, float16 or float32; n at most 32768.
        weight: ``[n]``, x's dtype or float32.
        eps: added to the mean square.
        residual: like x; ``None``: h is x itself.
        before: a weight too: the residual is added to x's own norm with it.

    Returns:
        y and h, in x's dtype. h is rounded before it is normalized, as is a norm before the residual is added
        to it, and the normalized row before a weight of x's dtype multiplies it, but not before one of
        float32 does, as models are trained with; statistics are float32.

    Raises:
        ValueError: shapes don't fit.
    """
    _check(x, weight, residual, before)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y, _launch(x, weight, eps, residual, before, rms_norm_kernel, {"y_ptr": y, "t_ptr": None},
                      constants(x.shape[-1], starts(x.device)))


def rms_norm_levels(x: torch.Tensor, weight: torch.Tensor, eps: float, kind: torch.dtype,
                    residual: torch.Tensor | None = None, before: torch.Tensor | None = None
                    ) -> tuple[QuantizedActivations, torch.Tensor]:
    """:func:`rms_norm` of ``[m, n]``, and y rounded by :func:`~quantkit_kernels.triton.levels.quantize`.

    Returns:
        Levels of the y that would have been returned, and h.

    Raises:
        ValueError: shapes don't fit, or there are no levels of that kind.
    """
    _check(x, weight, residual, before)
    result = empty(x, kind)
    return result, _launch(x, weight, eps, residual, before, rms_norm_kernel,
                           {"y_ptr": result.values, "t_ptr": result.scale},
                           constants(x.shape[-1], starts(x.device)))


def rms_norm_groups(x: torch.Tensor, weight: torch.Tensor, eps: float, how: GroupRounding,
                    residual: torch.Tensor | None = None, before: torch.Tensor | None = None
                    ) -> tuple[QuantizedActivations, torch.Tensor]:
    """:func:`rms_norm` of ``[m, n]``, and y rounded by
    :func:`~quantkit_kernels.triton.token_groups.round_groups`.

    Returns:
        Rounded rows of the y that would have been returned, and h.

    Raises:
        ValueError: shapes don't fit, or there are no such groups.
    """
    if x.shape[-1] > LONGEST_GROUPED:
        y, h = rms_norm(x, weight, eps, residual, before)
        return round_groups(y, how), h
    _check(x, weight, residual, before)
    result = empty_groups(x, how)
    return result, _launch(x, weight, eps, residual, before, rms_norm_groups_kernel,
                           {"f_ptr": how.factor, "l_ptr": result.values, "t_ptr": result.scale},
                           group_constants(x.shape[1], how, starts(x.device)))


def group_constants(n: int, how: GroupRounding, early: bool) -> dict[str, int | bool]:
    """Compile-time arguments and options for rows of n numbers; ``early``: see
    :func:`~quantkit_kernels.triton.dependent.starts`."""
    columns = how.columns(n)
    return {**constants(max(columns, how.group), early), "N": n, "COLUMNS": columns,
            "WIDTH": how.width(n), "GROUP": how.group, "PACKED": how.packed > 0,
            "LEVEL_BITS": how.bits}


def _check(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None,
           before: torch.Tensor | None) -> None:
    n = x.shape[-1]
    if (weight.shape != (n,) or n > LONGEST or (residual is not None and residual.shape != x.shape)
            or (before is not None and (residual is None or before.shape != (n,)))):
        shapes = [None if tensor is None else list(tensor.shape) for tensor in (x, weight, residual, before)]
        raise ValueError("x {}, weight {}, residual {} and a weight before {} don't fit".format(*shapes))


def _launch(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None,
            before: torch.Tensor | None, kernel: Any, results: dict[str, torch.Tensor | None],
            options: dict[str, Any]) -> torch.Tensor:
    """Returns h."""
    x = x.contiguous()
    h = x if residual is None else torch.empty_like(x)
    if x.numel():
        kernel[(x.numel() // x.shape[-1],)](
            x, None if before is None else before.contiguous(),
            None if residual is None else residual.to(x.dtype).contiguous(), weight.contiguous(),
            None if residual is None else h, **results, eps=eps, **options)
    return h
