"""GPTQ's inner loop: round a column, spread its error over the columns of its block, repeat.

https://arxiv.org/abs/2210.17323. In torch every column is half a dozen launches, here a block of columns is
one. A program has some rows of the weight and all columns of the block in its registers: rows don't depend on
one another. Without fused multiply-adds its numbers are those of the same loop in torch, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LONGEST = 128
"""Columns of a block, at most: they are in registers."""
ROWS = 16
WARPS = 1
"""A sum over the columns of a row stays within a warp."""
FARTHEST = tl.constexpr(2097152.0)  # 2 ** 21: further out every level is clamped anyway
WHOLE = tl.constexpr(12582912.0)  # 1.5 * 2 ** 23: adding it rounds to an integer, half to even


@triton.jit
def _column(corner_ptr: tl.tensor, scale_ptr: tl.tensor, zero_ptr: tl.tensor, group_ptr: tl.tensor,
            i: tl.tensor, n: tl.tensor, out: tl.tensor, rn: tl.tensor, rj: tl.tensor) -> tl.tensor:
    """What solving column i takes: the factor's row, and the grid of its group for each row of the weight."""
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
    """ROWS rows of one weight, n columns.

    work, level, error ``[linears, n, out]``, ``*_step`` elements from one weight to the next; corner
    ``[linears, n, n]``; scale, zero ``[linears, groups, out]``; all float32; group int64 ``[linears, n]``.
    """
    rn = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rj = tl.arange(0, COLUMNS)
    one = tl.program_id(1).to(tl.int64)
    corner_ptr += one * n * n
    scale_ptr += one * groups * out
    zero_ptr += one * groups * out
    group_ptr += one * n
    here = rj.to(tl.int64)[:, None] * out + rn[None, :]
    work = tl.load(work_ptr + one * work_step + here, mask=(rj < n)[:, None] & (rn < out)[None, :],
                   other=0.0)
    factor, pivot, scale, zero = _column(corner_ptr, scale_ptr, zero_ptr, group_ptr, 0, n, out, rn, rj)
    for i in range(n):
        # the next column's are on their way while this one is solved
        following = tl.minimum(i + 1, n - 1)
        factor1, pivot1, scale1, zero1 = _column(corner_ptr, scale_ptr, zero_ptr, group_ptr, following, n,
                                                 out, rn, rj)
        column = tl.sum(tl.where((rj == i)[:, None], work, 0.0), 0)
        level = tl.minimum(tl.maximum(tl.math.div_rn(column, scale), -FARTHEST), FARTHEST)
        level = tl.minimum(tl.maximum((level + WHOLE) - WHOLE + zero, 0.0), TOP)
        error = tl.math.div_rn(column - (level - zero) * scale, tl.zeros_like(column) + pivot)
        work -= factor[:, None] * error[None, :]
        tl.store(level_ptr + one * level_step + i * out + rn, level, mask=rn < out)
        tl.store(error_ptr + one * error_step + i * out + rn, error, mask=rn < out)
        factor, pivot, scale, zero = factor1, pivot1, scale1, zero1


def constants(n: int, bits: int) -> dict[str, float | bool]:
    """Compile-time arguments and options for n columns."""
    return {"TOP": 2.0**bits - 1, "COLUMNS": max(16, triton.next_power_of_2(n)), "ROWS": ROWS,
            "num_warps": WARPS, "enable_fp_fusion": False}


def solve_block(work: torch.Tensor, corner: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor,
                groups: torch.Tensor, bits: int, levels: torch.Tensor, errors: torch.Tensor) -> None:
    """Solve n columns of several weights.

    Column i goes to the nearest level of its grid; its error over ``corner[i, i]`` is left in ``errors``, and
    times ``corner[i, j]`` taken from each later column j.

    Args:
        work: float32 ``[linears, n, out]``, n at most :data:`LONGEST`, a weight's columns next to each other;
            not written to.
        corner: float32 ``[linears, n, n]``: of ``U`` with ``H⁻¹ = Uᵀ U`` what belongs to these columns.
        scale, zero: float32 ``[linears, groups, out]``: level v stands for ``(v - zero) * scale``.
        groups: int64 ``[linears, n]``, of each column.
        bits: levels are 0 … 2^bits - 1.
        levels, errors: float32 like work: where results go.

    Raises:
        ValueError: shapes or dtypes don't fit.
    """
    linears, n, out = work.shape
    tensors = (work, corner, scale, zero, levels, errors)
    if (not 0 < n <= LONGEST or corner.shape != (linears, n, n) or levels.shape != work.shape
            or errors.shape != work.shape or scale.shape != zero.shape or scale.shape[::2] != (linears, out)
            or groups.shape != (linears, n) or not 1 <= bits <= 8
            or any(one.dtype != torch.float32 for one in tensors)
            or any(one.stride()[1:] != (out, 1) for one in (work, levels, errors))):
        raise ValueError(f"work {list(work.shape)}, corner {list(corner.shape)}, grids {list(scale.shape)} "
                         f"and groups {list(groups.shape)} don't fit together")
    solve_block_kernel[(-(-out // ROWS), linears)](
        work, corner.contiguous(), scale.contiguous(), zero.contiguous(), groups.contiguous(), levels, errors,
        n, out, scale.shape[1], work.stride(0), levels.stride(0), errors.stride(0), **constants(n, bits))
