"""GPTQ as its paper has it, https://arxiv.org/abs/2210.17323: one column at a time, in float64.

It is what the implementations in :mod:`~quantkit.quantization.methods.gptq` are tested against: our kernels
for CPUs, torch, and the kernel for GPUs. They differ from it only in speed. Where this keeps the inverse
Hessian of the columns that are left up to date (equation 3), they read all of that from one Cholesky factor
``U`` with ``H⁻¹ = Uᵀ U`` (the paper's step 3): ``U[q, q]² = [H_F⁻¹]_qq``. And they update columns that are
far away a block at a time (step 2, equations 4 and 5).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ReferenceSolution:
    """What GPTQ makes of a weight ``[out, in]``.

    Attributes:
        levels: the level of every weight, float64 ``[out, in]``.
        errors: every column's error over ``U[q, q]``, ``E`` in the paper's algorithm, float64 ``[out, in]``.
    """

    levels: torch.Tensor
    errors: torch.Tensor


def solve_columns(weight: torch.Tensor, hessian: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor,
                  groups: torch.Tensor, order: torch.Tensor, bits: int) -> ReferenceSolution:
    """Quantize a weight column by column.

    Args:
        weight: the weight, ``[out, in]``.
        hessian: ``[in, in]``, the mean of ``x xᵀ`` over calibration tokens, damped: the paper has
            ``2 X Xᵀ + λ I``, and a factor changes nothing.
        scale: ``[out, groups]``; a level ``v`` stands for ``(v - zero) * scale``.
        zero: the level that means 0, of the same shape.
        groups: int64 ``[in]``, the group of each column.
        order: int64 ``[in]``, the columns in the order in which they are quantized: as they stand, or those
            with the largest diagonal of the Hessian first (``act_order``).
        bits: the bits of a level: levels are 0 … 2 ** bits - 1.

    Returns:
        Levels and errors, as the paper's algorithm has them.
    """
    work = weight.double().clone()
    inverse = torch.linalg.inv(hessian.double())  # [H_F⁻¹], with F all columns
    levels, errors = torch.empty_like(work), torch.empty_like(work)
    left = order.tolist()
    for q in order.tolist():
        left.remove(q)
        grid, middle = scale[:, groups[q]].double(), zero[:, groups[q]].double()
        # quant(w_q): the nearest level of the column's grid
        levels[:, q] = ((work[:, q] / grid).round() + middle).clamp(0, 2**bits - 1)
        error = work[:, q] - (levels[:, q] - middle) * grid
        errors[:, q] = error / inverse[q, q].sqrt()
        # equation 2: δ_F = −(w_q − quant(w_q)) / [H_F⁻¹]_qq · (H_F⁻¹)_:,q
        work[:, left] -= torch.outer(error / inverse[q, q], inverse[q, left])
        # equation 3: H⁻¹_−q = (H⁻¹ − H⁻¹_:,q H⁻¹_q,: / [H⁻¹]_qq)_−q
        inverse = inverse - torch.outer(inverse[:, q], inverse[q]) / inverse[q, q]
    return ReferenceSolution(levels, errors)
