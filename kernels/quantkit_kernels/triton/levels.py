"""Activations rounded to 8 bits as they come: one scale a token.

The scale is ``max|x| / 127`` for integers, https://arxiv.org/abs/2206.01861, and ``max|x| / 448`` for e4m3,
https://arxiv.org/abs/2209.05433. Levels are the nearest, ties to even. A token that isn't finite has the
scale NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quantkit_kernels.triton.dependent import let_next_begin, starts

LONGEST = 32768
"""Numbers in a row: a row is one program's, in registers."""
KINDS = (torch.int8, torch.float8_e4m3fn, torch.float16)


@dataclass(frozen=True)
class QuantizedActivations:
    """Rounded activations; x is about ``values · scale``.

    Attributes:
        values: ``[m, k]``: int8, e4m3, or e4m3's numbers as float16, for GPUs that don't multiply e4m3.
        scale: the rows' scales, float32 ``[m]``.
        dtype: the dtype of the activations that were rounded, and of a product with them.
    """

    values: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype


@triton.jit
def to_levels(x: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """One row, float32 and 0 beyond its end → levels, still float32, and their scale.

    ``KIND``: the dtype that levels are stored in.
    """
    size = tl.abs(x)
    # a comparison that NaN and infinity fail; a maximum may leave NaN out
    broken = tl.sum((size <= 3.4028234663852886e38).to(tl.int32) ^ 1) > 0
    top = tl.maximum(tl.max(size), 2.0**-100)
    if KIND.is_int8():
        scale = tl.div_rn(top, 127.0)
        # whole numbers are 1 apart there
        level = (tl.div_rn(x, scale) + 12582912.0) - 12582912.0
    else:
        scale = tl.div_rn(top, 448.0)
        level = tl.minimum(tl.maximum(tl.div_rn(x, scale), -448.0), 448.0)
        # 1.5 · 2^(e + 20) leaves four bits of a number with exponent e; below 2^-6 steps don't shrink
        e = tl.maximum(level.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23) + (20 << 23)
        large = e.to(tl.float32, bitcast=True) * 1.5
        level = (level + large) - large
    return tl.where(broken, 0.0, level), tl.where(broken, float("nan"), scale)


@triton.jit
def quantize_kernel(x_ptr: tl.tensor, l_ptr: tl.tensor, t_ptr: tl.tensor, x_row: tl.tensor, N: tl.constexpr,
                    BLOCK: tl.constexpr, EARLY: tl.constexpr) -> None:
    """One row: x ``[m, N]``, rows x_row apart; levels ``[m, N]``, scales float32 ``[m]``."""
    if EARLY:
        let_next_begin()
    row = tl.program_id(0).to(tl.int64)
    rn = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_row + rn, mask=rn < N, other=0.0).to(tl.float32)
    level, scale = to_levels(x, l_ptr.dtype.element_ty)
    tl.store(l_ptr + row * N + rn, level.to(l_ptr.dtype.element_ty), mask=rn < N)
    tl.store(t_ptr + row, scale)


def constants(n: int, early: bool) -> dict[str, int]:
    """Compile-time arguments and options for rows of n numbers; ``early``: see
    :func:`~quantkit_kernels.triton.dependent.starts`."""
    block = triton.next_power_of_2(n)
    return {"N": n, "BLOCK": block, "EARLY": early, "num_warps": min(16, max(1, block // 1024))}


def empty(x: torch.Tensor, kind: torch.dtype) -> QuantizedActivations:
    """Unwritten levels for activations ``[m, n]``. Raises ValueError: no such kind, or rows too long."""
    if kind not in KINDS or x.ndim != 2 or x.shape[1] > LONGEST:
        raise ValueError(f"levels are int8, float8_e4m3fn or float16, of [m, n] with n up to {LONGEST}, "
                         f"not {kind} of {list(x.shape)}")
    return QuantizedActivations(torch.empty(x.shape, dtype=kind, device=x.device),
                                torch.empty(x.shape[0], dtype=torch.float32, device=x.device), x.dtype)


def quantize(x: torch.Tensor, kind: torch.dtype) -> QuantizedActivations:
    """Rows ``[m, n]``, any floating dtype, n at most 32768 → levels of that kind and their scales.

    Raises:
        ValueError: another kind than :class:`QuantizedActivations` has, or another shape.
    """
    result = empty(x, kind)
    if x.shape[0]:
        x = x if x.stride(1) == 1 else x.contiguous()
        quantize_kernel[(x.shape[0],)](x, result.values, result.scale, x.stride(0),
                                       **constants(x.shape[1], starts(x.device)))
    return result
