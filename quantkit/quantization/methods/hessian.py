"""What the methods do with a Hessian before they solve: check it, damp it, factorize it.

Of an input of 14336 channels a Hessian takes 0.8 GB. Beside the one that is given, :func:`factorize` has one
more in memory at its peak, in which the result lies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quantkit.formats.finite import all_finite
from quantkit.ops.reference import native_bf16
from quantkit.quantization.methods.base import LayerStats
from quantkit.support.errors import CalibrationError

MOST_DAMPING = 10.0
"""Times the Hessian's mean diagonal: beyond it the Hessian no longer decides anything."""
UNREACHED = "no calibration input reached it"
WHOLE = 512
"""Columns of a matrix that are factorized or inverted at a time on a CPU: nearly all of the rest is products,
which are faster."""
WHOLE_GPU = 2048
"""The same on a GPU."""
_ROWS = 1024
CLOSE = 1.25
"""Times a loss, below which another one may in truth be lower where both are of products in bfloat16."""
ROUNDING = 2.0**-6
"""Eight times what such products deviate by, in units of the loss of a diagonal Hessian."""
NO_BETTER = "rounded to nearest in place of gptq: its loss on the calibration text was no lower"


@dataclass(frozen=True)
class HessianFactors:
    """A Hessian, ready for solving.

    Attributes:
        damping: the number that was added to the diagonal.
        upper: float32 ``[in, in]`` with ``H⁻¹ = Uᵀ U`` in solving order, ``H`` damped.
        order: int64 ``[in]``, the columns in the order in which they are solved.
    """

    damping: float
    upper: torch.Tensor
    order: torch.Tensor


def hessian_of(weight: torch.Tensor, stats: LayerStats | None, method: str = "gptq") -> torch.Tensor:
    """The Hessian for a weight ``[out, in]``. Raises CalibrationError without one that fits and is finite."""
    if stats is None or stats.hessian is None:
        raise CalibrationError(f"{method} was given no Hessian", why="it needs calibration text",
                               next="add a calibration section to the recipe, or use method rtn")
    cols = weight.shape[1]
    if tuple(stats.hessian.shape) != (cols, cols):
        raise CalibrationError(f"the Hessian is {list(stats.hessian.shape)}, the layer has {cols} inputs")
    if not all_finite(stats.hessian):
        raise CalibrationError(f"the Hessian of {stats.tokens} tokens holds NaN or infinity",
                               why="an activation overflowed while calibrating",
                               next="use another calibration text, or dtype float32")
    return stats.hessian


def factorize(hessian: torch.Tensor, damp: float,
              act_order: bool) -> tuple[HessianFactors | None, tuple[str, ...]]:
    """Factors and notes; ``None`` where no damping up to ``MOST_DAMPING`` helps.

    Args:
        hessian: float32 ``[in, in]``, finite.
        damp: added to the diagonal, in units of its mean; raised tenfold while factorizing fails.
        act_order: the columns with the largest diagonal first.
    """
    diagonal = hessian.diagonal()
    order = torch.arange(diagonal.numel(), device=hessian.device)
    if act_order:
        order = torch.argsort(diagonal, descending=True, stable=True)
    mean = float(diagonal.mean())
    if not mean > 0:
        return None, (f"rounded to nearest in place of gptq: {UNREACHED}",)
    requested, notes = damp, tuple[str, ...]()
    while damp <= MOST_DAMPING:
        if (upper := _upper(hessian, damp * mean, order)) is not None:
            return HessianFactors(damp * mean, upper, order), notes
        damp *= 10
        notes = (f"damping raised from {requested:g} to {damp:g}: the Hessian is not positive definite",)
    return None, ("rounded to nearest in place of gptq: the Hessian is not positive definite at damping "
                  f"{damp / 10:g}",)


def column_costs(factors: HessianFactors) -> torch.Tensor:
    """What an error in a column costs if all other columns make up for it as far as they can: one over the
    diagonal of ``H⁻¹``, float32 ``[in]``, as in Optimal Brain Surgeon,
    https://papers.nips.cc/paper/1992/hash/303ed4c69846ab36c2904d3ba8573050-Abstract.html."""
    costs = torch.empty_like(factors.upper[0])
    costs[factors.order] = torch.linalg.vector_norm(factors.upper, dim=0).square_().reciprocal_()
    return costs


def undrifted(weight: torch.Tensor, drift: torch.Tensor, factors: HessianFactors,
              share: float) -> torch.Tensor:
    """The weights that give, on the inputs as they have become, what the given ones gave on the original
    model's: ``W + share · W D H⁻¹``, a least-squares fit, as in GPTAQ, https://arxiv.org/abs/2504.02692.

    Args:
        weight: float32 ``[out, in]``.
        drift: ``D``, float32 ``[in, in]``, mean of ``(x̂ − x) xᵀ``.
        share: the share of the drift that is made up for; all of it fits the calibration text's chance, too.
    """
    pull = torch.linalg.multi_dot([weight, drift[:, factors.order], factors.upper.T, factors.upper])
    result = torch.empty_like(weight)
    result[:, factors.order] = pull
    return result.mul_(share).add_(weight)


def damped(hessian: torch.Tensor, damping: float, order: torch.Tensor | None = None) -> torch.Tensor:
    """A copy ``[in, in]`` with ``damping`` added to the diagonal; rows and columns in ``order`` if given."""
    if order is None:
        result = hessian.clone()
    else:
        result = torch.empty_like(hessian)
        for rows, places in zip(result.split(_ROWS), order.split(_ROWS), strict=True):
            torch.index_select(hessian[places], 1, order, out=rows)
    result.diagonal().add_(damping)
    return result


def symmetric_(matrix: torch.Tensor) -> torch.Tensor:
    """Mirror what is on and below the diagonal of a square matrix, in place."""
    for start in range(0, len(matrix), _ROWS):
        rows = matrix[start:start + _ROWS]
        matrix[:start, start:start + _ROWS] = rows[:, :start].T
        block = rows[:, start:start + _ROWS]
        block.copy_(block.tril() + block.tril(-1).T)
    return matrix


def _upper(hessian: torch.Tensor, damping: float, order: torch.Tensor) -> torch.Tensor | None:
    """``U`` with ``H⁻¹ = Uᵀ U``, or ``None`` where the damped Hessian is not positive definite.

    With the order reversed, the lower factor is the upper factor of ``H`` itself: one factorization and one
    triangular inverse, where factorizing the inverse takes three.
    """
    factor = damped(hessian, damping, order.flip(0))
    if not _factorize_(factor) or not all_finite(factor):
        return None
    _reverse_(factor.view(-1))
    return _invert_upper_(factor.mT)


def _factorize_(matrix: torch.Tensor) -> bool:
    """Put the upper factor ``R`` of a symmetric matrix ``Rᵀ R`` in its place, a block of rows at a time;
    whether it is positive definite."""
    size, width = len(matrix), _block_width(matrix)
    for start in range(0, size, width):
        stop = min(start + width, size)
        block = slice(start, stop)
        corner, failed = torch.linalg.cholesky_ex(matrix[block, block], upper=True)
        if int(failed):
            return False
        matrix[block, :start] = 0
        matrix[block, block] = corner
        rest = matrix[block, stop:]
        rest.copy_(torch.linalg.solve_triangular(corner, _eye(corner), upper=True).mT @ rest)
        for first in range(stop, size, width):  # only what is on and above the diagonal is read
            rows = slice(first, first + width)
            matrix[rows, first:].addmm_(matrix[block, rows].mT, matrix[block, first:], alpha=-1)
    return True


def _block_width(matrix: torch.Tensor) -> int:
    return WHOLE if matrix.device.type == "cpu" else WHOLE_GPU


def _eye(matrix: torch.Tensor) -> torch.Tensor:
    return torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)


def _reverse_(values: torch.Tensor) -> None:
    """Turn a vector around in place: a matrix is then transposed along its other diagonal."""
    size, half = len(values), len(values) // 2
    for start in range(0, half, 1 << 20):
        front, back = values[start:min(start + (1 << 20), half)], slice(max(size - start - (1 << 20),
                                                                           size - half), size - start)
        turned = front.flip(0)
        front.copy_(values[back].flip(0))
        values[back] = turned


def _invert_upper_(matrix: torch.Tensor) -> torch.Tensor:
    """The inverse of an upper triangular matrix: a block of columns at a time, in place."""
    size, width = len(matrix), _block_width(matrix)
    for start in range(0, size, width):
        block = slice(start, min(start + width, size))
        corner = torch.linalg.solve_triangular(matrix[block, block], _eye(matrix[block, block]), upper=True)
        for first in range(0, start, width):  # a row needs those below it, as they were
            above = matrix[first:first + width, first:start] @ matrix[first:start, block]
            matrix[first:first + width, block] = (above @ corner).neg_()
        matrix[block, block] = corner
    return matrix


def losses(error: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """``eᵀ H e`` of every row, float32 ``[out]``."""
    return ((error @ hessian) * error).sum(dim=1)


def rows_below(error: torch.Tensor, other: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """Whether a row's ``eᵀ H e`` is at most that of the ``other`` errors, bool ``[out]``; False where one is
    NaN. Where a CPU multiplies in bfloat16, only rows for which that doesn't decide it take float32."""
    if error.device.type != "cpu" or not native_bf16():
        return losses(error, hessian) <= losses(other, hessian)
    half = hessian.to(torch.bfloat16)
    rough, rough_other = (((e.to(torch.bfloat16) @ half).float() * e).sum(dim=1) for e in (error, other))
    # by chance, eᵀ H e of rounded factors is some 2⁻⁹ Σ e² diag(H) off: H_ij² is at most H_ii H_jj
    doubt = (error.square() + other.square()) @ hessian.diagonal() * ROUNDING
    below = rough * CLOSE + doubt <= rough_other
    close = (~below).nonzero().flatten()
    below[close] = losses(error[close], hessian) <= losses(other[close], hessian)
    return below
