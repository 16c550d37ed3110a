"""Rotations of rows, beside a product with the whole matrix."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quantkit_kernels import reference
from quantkit_kernels.tools.bench_cases.case import BenchCase, ModelShapes, size
from quantkit_kernels.triton.hadamard import apply_hadamard


def cases(shapes: ModelShapes, device: torch.device, dtype: torch.dtype) -> Iterator[BenchCase]:
    """Hidden states."""
    for m in shapes.rows:
        yield _rotation(shapes.linears[0][2], m, device, dtype)


def _rotation(n: int, m: int, device: torch.device, dtype: torch.dtype) -> BenchCase:
    x = torch.randn(m, n, dtype=dtype, device=device)
    signs, mix, dense = reference.rotation(n, device)
    matrix = dense.to(dtype)
    return BenchCase("hadamard", f"m{m}", lambda at: apply_hadamard(x, signs, mix), lambda at: x @ matrix,
                     "matmul", 2 * size(x), 2 * size(x) + size(matrix), 0, 1, 1, 0.02, cold=False)
