"""What the methods do with a Hessian before they solve: check it, damp it, factorize it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quantkit.errors import CalibrationError
from quantkit.methods.base import LayerStats

MOST_DAMPING = 10.0
"""Times the Hessian's mean diagonal: beyond it the Hessian no longer decides anything."""
NO_BETTER = "rounded to nearest in place of gptq: its loss on the calibration text was no lower"


@dataclass(frozen=True)
class Factors:
    """A Hessian, ready for solving.

    Attributes:
        damped: float32 ``[in, in]``, with what was added to the diagonal.
        upper: float32 ``[in, in]`` with ``H⁻¹ = Uᵀ U`` in solving order.
        order: int64 ``[in]``, the columns in the order in which they are solved.
    """

    damped: torch.Tensor
    upper: torch.Tensor
    order: torch.Tensor


def hessian_of(weight: torch.Tensor, stats: LayerStats | None) -> torch.Tensor:
    """The Hessian for a weight ``[out, in]``. Raises CalibrationError without one that fits and is finite."""
    if stats is None or stats.hessian is None:
        raise CalibrationError("gptq was given no Hessian", why="it needs calibration text",
                               next="add a calibration section to the recipe, or use method rtn")
    cols = weight.shape[1]
    if tuple(stats.hessian.shape) != (cols, cols):
        raise CalibrationError(f"the Hessian is {list(stats.hessian.shape)}, the layer has {cols} inputs")
    if not bool(torch.isfinite(stats.hessian).all()):
        raise CalibrationError(f"the Hessian of {stats.tokens} tokens holds NaN or infinity",
                               why="an activation overflowed while calibrating",
                               next="use another calibration text, or dtype float32")
    return stats.hessian


def factorize(hessian: torch.Tensor, damp: float, act_order: bool) -> tuple[Factors | None, tuple[str, ...]]:
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
        return None, ("rounded to nearest in place of gptq: no calibration input reached it",)
    asked, notes = damp, tuple[str, ...]()
    while damp <= MOST_DAMPING:
        damped = hessian.clone()
        damped.diagonal().add_(damp * mean)
        # with the order reversed, the lower factor is the upper factor of H itself: one
        # factorization and one triangular inverse, where factorizing the inverse takes three
        backwards = order.flip(0)
        lower, failed = torch.linalg.cholesky_ex(damped[backwards][:, backwards])
        if not int(failed) and bool(torch.isfinite(lower).all()):
            eye = torch.eye(diagonal.numel(), dtype=hessian.dtype, device=hessian.device)
            upper = torch.linalg.solve_triangular(lower.flip(0, 1), eye, upper=True)
            return Factors(damped, upper, order), notes
        damp *= 10
        notes = (f"damping raised from {asked:g} to {damp:g}: the Hessian is not positive definite",)
    return None, ("rounded to nearest in place of gptq: the Hessian is not positive definite at damping "
                  f"{damp / 10:g}",)


def losses(error: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """``eᵀ H e`` of every row, float32 ``[out]``."""
    return ((error @ hessian) * error).sum(dim=1)
