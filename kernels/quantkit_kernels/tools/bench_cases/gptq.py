"""GPTQ's inner loop over a block of columns, beside the same loop in torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quantkit_kernels.tools.bench_cases.case import BenchCase, ModelShapes, size
from quantkit_kernels.triton.gptq import LONGEST, solve_block

GROUP, TOP = 128, 15


def cases(shapes: ModelShapes, device: torch.device, dtype: torch.dtype) -> Iterator[BenchCase]:
    """The attention's output, in float32 as it is solved; one block of columns."""
    _, out, columns = min(shapes.linears, key=lambda linear: linear[1])
    n = min(LONGEST, columns // 8)
    work = torch.randn(1, n, out, device=device) * 0.1
    mixed = torch.randn(n, 2 * n, device=device)
    hessian = mixed @ mixed.T / (2 * n) + torch.eye(n, device=device)
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian.cpu())).mT.contiguous().to(device)[None]
    scale = torch.rand(1, 1, out, device=device) * 0.02 + 0.02
    zero = torch.full_like(scale, 8.0)
    groups = torch.zeros(1, n, dtype=torch.int64, device=device)
    levels, errors = torch.empty_like(work), torch.empty_like(work)
    pivots = upper[0].diagonal().cpu().tolist()

    def ours(at: int) -> torch.Tensor:
        solve_block(work, upper, scale, zero, groups, 4, levels, errors)
        return levels

    def theirs(at: int) -> torch.Tensor:
        left, codes = work[0].clone(), torch.empty_like(work)
        for i, pivot in enumerate(pivots):
            level = (left[i] / scale[0, 0]).round_().add_(zero[0, 0]).clamp_(0, TOP)
            error = (left[i] - (level - zero[0, 0]) * scale[0, 0]).div_(pivot)
            left[i + 1:].addcmul_(upper[0, i, i + 1:, None], error[None], value=-1)
            codes[0, i] = level
        return codes

    moved = size(work, levels, errors, upper)
    # where a number lies within rounding of the middle of two levels, either is right
    yield BenchCase("gptq", f"{n}x{out}", ours, theirs, "loop", moved, moved, n * n * out, 1, 1, 0.01,
                    cold=False)
