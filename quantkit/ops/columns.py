"""GPTQ's loops over the columns of a weight, on a CPU: our own kernels, on all threads.

https://arxiv.org/abs/2210.17323. A weight is handed over as tiles ``[tiles, in, 64]`` of 64 rows
(:func:`tiles`). The kernels' results are the same whatever the CPU and the number of threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from quantkit.ops.cpu_machine import isa, pool, reason_against_kernels
from quantkit.support.progress import tell_compiling

if TYPE_CHECKING:
    from quantkit_kernels.cpu.columns import DescendColumns, SearchRanges, SolveColumns

ROWS = 64
LARGEST_GROUP = 256
"""Columns of a group whose scales a kernel descends on, at most."""


def by_kernel(device: torch.device) -> bool:
    return device.type == "cpu" and reason_against_kernels() is None


def tiles(weight: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
    """float32 ``[out, in]`` → ``[tiles, in, 64]``; rows that are missing in the last tile are ``fill``."""
    rows, columns = weight.shape
    missing = -rows % ROWS
    if missing:
        weight = torch.cat([weight, weight.new_full((missing, columns), fill)])
    return weight.view(-1, ROWS, columns).mT.contiguous()


def untile(tiled: torch.Tensor, rows: int) -> torch.Tensor:
    """The inverse of :func:`tiles`."""
    return tiled.mT.reshape(-1, tiled.shape[1])[:rows]


def search_ranges(weight: torch.Tensor, cost: torch.Tensor, size: int, factors: tuple[float, ...], bits: int,
                  symmetric: bool, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and zero of every group: of some factors on its extremes the one with the least error.

    Args:
        weight: float32 ``[tiles, in, 64]``.
        cost: float32 ``[in]``, of a column's squared error.
        size: columns of a group.
        factors: the factors that are tried.
        bits, symmetric, dtype: of the grid, and of its scales.

    Returns:
        Two float32 ``[tiles, groups, 64]``.
    """
    from quantkit_kernels.cpu.columns import SearchRanges

    count, columns, rows = weight.shape
    scale, zero = (torch.empty(count, columns // size, rows) for _ in range(2))
    _run(SearchRanges(bits, symmetric, dtype), count, 0, weight=weight, cost=cost.contiguous(),
         factors=torch.tensor(factors, dtype=torch.float32), scale=scale, zero=zero, columns=columns,
         groups=columns // size, size=size, count=len(factors))
    return scale, zero


def solve_columns(work: torch.Tensor, upper: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor,
                  groups: torch.Tensor, bits: int,
                  table: tuple[float, ...] | None = None) -> torch.Tensor:
    """Round a column, spread its error over those left, and so on.

    Args:
        work: float32 ``[tiles, in, 64]``, in the order of solving; overwritten.
        upper: float32 ``[in, in]`` with ``H⁻¹ = Uᵀ U``, in that order; not copied where its columns are
            contiguous.
        scale, zero: float32 ``[tiles, groups, 64]``.
        groups: int64 ``[in]``, the group of each column.
        bits: the bits of a level.
        table: the values of levels, rising, where they aren't equal steps.

    Returns:
        Levels float32 ``[tiles, in, 64]``.
    """
    from quantkit_kernels.cpu.columns import SolveColumns

    levels, kernel = torch.empty_like(work), SolveColumns(bits, table)
    _run(kernel, len(work), kernel.room_bytes, work=work, lower=upper.mT.contiguous(), scale=scale, zero=zero,
         group=groups.contiguous(), levels=levels, columns=work.shape[1], groups=scale.shape[1])
    return levels


def descend_columns(slopes: torch.Tensor, levels: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor,
                    hessian: torch.Tensor, bits: int, dtype: str | None, descent_passes: int,
                    refits: int, table: tuple[float, ...] | None = None) -> None:
    """Coordinate descent on ``eᵀ H e``: each step is exact, so that no row's loss rises.

    Args:
        slopes: float32 ``[tiles, in, 64]``, ``H e`` of the weights' errors ``e``; kept up to date.
        levels: float32 ``[tiles, in, 64]``, changed in place.
        scale: float32 ``[tiles, groups, 64]``, changed in place where ``dtype`` isn't ``None``.
        zero: a tensor of the same shape.
        hessian: float32 ``[in, in]``, its diagonal positive.
        bits: the bits of a level.
        dtype: in which scales are stored; ``None``: they stay as they are.
        descent_passes: passes over all groups, each with its scale and then its levels.
        refits: passes in which scales move; those beyond ``descent_passes`` leave levels alone.
        table: the values of levels, rising, where they aren't equal steps.
    """
    from quantkit_kernels.cpu.columns import BLOCK, DescendColumns

    size = slopes.shape[1] // scale.shape[1]
    block, kernel = BLOCK if dtype is None else size, DescendColumns(bits, dtype, table)
    _run(kernel, len(slopes), kernel.room_bytes(block), slopes=slopes, levels=levels, scale=scale, zero=zero,
         hessian=hessian.contiguous(), columns=slopes.shape[1], groups=scale.shape[1], size=size, block=block,
         passes=max(descent_passes, refits), level_passes=descent_passes)


def _run(kernel: SearchRanges | SolveColumns | DescendColumns, units: int, room_bytes: int,
         **arguments: Any) -> None:
    """A program of one operation, on all threads."""
    from quantkit_kernels.cpu.program import Program

    if room_bytes:
        arguments |= {"room": torch.empty(pool().threads, room_bytes, dtype=torch.uint8),
                      "room_private": room_bytes}
    program = Program(isa())
    program.add(kernel, units, **arguments)
    program.finish(tell_compiling)
    pool().run(program.records)
