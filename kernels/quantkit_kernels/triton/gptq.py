"""GPTQ's inner loop: round a column, spread its error over the remaining columns of its block, repeat.

https://arxiv.org/abs/2210.17323. In torch every column takes half a dozen launches; here a whole block of
columns takes one. A program keeps some rows of the weight, with all columns of the block, in its registers:
rows don't depend on one another. Without fused multiply-adds the results equal those of the same loop in
torch, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LONGEST = 128
"""Largest number of columns in a block, which is kept in registers."""
ROWS = 16
WARPS = 1
"""A sum over the columns of a row stays within a warp."""
FARTHEST = tl.constexpr(2097152.0)  # 2 ** 21: beyond it every level is clamped anyway
WHOLE = tl.constexpr(12582912.0)  # 1.5 * 2 ** 23: adding it rounds to an integer, half to even


@triton.jit
def _column(corner_ptr: tl.tensor, scale_ptr: tl.tensor, zero_ptr: tl.tensor, group_ptr: tl.tensor,
            i: tl.tensor, n: tl.tensor, out: tl.tensor, rn: tl.tensor, rj: tl.tensor) -> tl.tensor:
    """Load what column i needs: the factor's row, its pivot, and its group's grid for each weight row."""
    group = tl.load(group_ptr + i).to(tl.int64) * out + rn
    factor = tl.load(corner_ptr + i * n + rj, mask=rj < n, other=0.0)
    scale = tl.load(scale_ptr + group, mask=rn < out, other=1.0)
    return factor, tl.load(corner_ptr + i * n + i), scale, tl.load(zero_ptr + group, mask=rn < out, other=0.0)


@triton.jit(do_not_specialize=["n"])
def solve_block_kernel(work_ptr: tl.tensor, corner_ptr: tl.tensor, scale_ptr: tl.tensor, zero_ptr: tl.tensor,
                       group_ptr: tl.tensor, level_ptr: tl.tensor, error_ptr: tl.tensor, n: tl.tensor,
                       out: tl.tensor, groups: tl.tensor, work_step: tl.tensor, level_step: tl.tensor,
                       error_step: tl.tensor, TOP: tl.constexpr, COLUMNS: tl.constexpr,
                       ROWS: tl.constexpr) -> None:
    """Solve n columns of ROWS rows of one weight.

    work, level and error are ``[linears, n, out]`` with ``*_step`` elements from one weight to the
    next; corner is ``[linears, n, n]``; scale and zero are ``[linears, groups, out]``; all of them float32.
    group is int64 ``[linears, n]``.
    """
    rn = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rj = tl.arange(0, COLUMNS)
    linear = tl.program_id(1).to(tl.int64)
    corner_ptr += linear * n * n
    scale_ptr += linear * groups * out
    zero_ptr += linear * groups * out
    group_ptr += linear * n
    cells = rj.to(tl.int64)[:, None] * out + rn[None, :]
    work = tl.load(work_ptr + linear * work_step + cells, mask=(rj < n)[:, None] & (rn < out)[None, :],
                   other=0.0)
    factor, pivot, scale, zero = _column(corner_ptr, scale_ptr, zero_ptr, group_ptr, 0, n, out, rn, rj)
    for i in range(n):
        # load the next column's data while this one is solved
        following = tl.minimum(i + 1, n - 1)
        factor1, pivot1, scale1, zero1 = _column(corner_ptr, scale_ptr, zero_ptr, group_ptr, following, n,
                                                 out, rn, rj)
        column = tl.sum(tl.where((rj == i)[:, None], work, 0.0), 0)
        level = tl.minimum(tl.maximum(tl.math.div_rn(column, scale), -FARTHEST), FARTHEST)
        level = tl.minimum(tl.maximum((level + WHOLE) - WHOLE + zero, 0.0), TOP)
        error = column - (level - zero) * scale
        error = tl.math.div_rn(error, tl.zeros_like(column) + pivot)
        work -= factor[:, None] * error[None, :]
        tl.store(level_ptr + linear * level_step + i * out + rn, level, mask=rn < out)
        tl.store(error_ptr + linear * error_step + i * out + rn, error, mask=rn < out)
        factor, pivot, scale, zero = factor1, pivot1, scale1, zero1


def constants(n: int, bits: int) -> dict[str, float | bool]:
    """Return the compile-time arguments and launch options for n columns."""
    return {"TOP": 2.0**bits - 1, "COLUMNS": max(16, triton.next_power_of_2(n)), "ROWS": ROWS,
            "num_warps": WARPS, "enable_fp_fusion": False}


def solve_block(work: torch.Tensor, corner: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor,
                groups: torch.Tensor, bits: int, levels: torch.Tensor, errors: torch.Tensor) -> None:
    """Solve n columns of several weights.

    Column i is rounded to the nearest level of its grid. Its error, divided by ``corner[i, i]``, is stored in
    ``errors``; that times ``corner[i, j]`` is subtracted from each later column j.

    Args:
        work: float32 ``[linears, n, out]``, n at most :data:`LONGEST`, with a weight's columns contiguous;
            it isn't modified.
        corner: float32 ``[linears, n, n]``: the block of ``U``, with ``H⁻¹ = Uᵀ U``, for these columns.
        scale, zero: float32 ``[linears, groups, out]``: level v stands for ``(v - zero) * scale``.
        groups: int64 ``[linears, n]``, the group of each column.
        bits: levels are 0 … 2^bits - 1.
        levels, errors: float32 with work's shape, where the results are written.

    Raises:
        ValueError: shapes or dtypes don't match.
    """
    linears, n, out = work.shape
    tensors, columns = (work, corner, scale, zero, levels, errors), (levels, errors)
    if (not 0 < n <= LONGEST or corner.shape != (linears, n, n)
            or any(tensor.shape != work.shape for tensor in columns)
            or scale.shape != zero.shape or scale.shape[::2] != (linears, out)
            or groups.shape != (linears, n) or not 1 <= bits <= 8
            or any(tensor.dtype != torch.float32 for tensor in tensors)
            or any(tensor.stride()[1:] != (out, 1) for tensor in (work, *columns))):
        raise ValueError(f"work {list(work.shape)}, corner {list(corner.shape)}, grids {list(scale.shape)} "
                         f"and groups {list(groups.shape)} don't fit together")
    solve_block_kernel[(-(-out // ROWS), linears)](
        work, corner.contiguous(), scale.contiguous(), zero.contiguous(), groups.contiguous(), levels, errors,
        n, out, scale.shape[1], work.stride(0), levels.stride(0), errors.stride(0), **constants(n, bits))
