"""What is done to rows of activations between products."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from quantkit_kernels.tools.bench_cases.case import BenchCase, ModelShapes, size
from quantkit_kernels.triton.levels import quantize
from quantkit_kernels.triton.rms_norm import rms_norm, rms_norm_levels


def cases(shapes: ModelShapes, device: torch.device, dtype: torch.dtype) -> Iterator[BenchCase]:
    """Norms, and levels."""
    for n in shapes.rows:
        yield _norm(shapes, n, device, dtype)
        yield _norm_levels(shapes, n, device, dtype)
        yield _levels(shapes, n, device, dtype)


def _rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True) / 127
    return (wide / scale).round_().to(torch.int8), scale


def _levels(shapes: ModelShapes, n: int, device: torch.device, dtype: torch.dtype) -> BenchCase:
    hidden = shapes.linears[0][2]
    x = torch.randn(n, hidden, dtype=dtype, device=device)
    moved = size(x) + x.numel() + 4 * n
    return BenchCase("quantize int8", f"m{n}", lambda at: quantize(x, torch.int8).values,
                     lambda at: _rounded(x)[0], "amax, div, round", moved, moved, 0, 1, 1, 0.02, cold=False)


def _norm_levels(shapes: ModelShapes, n: int, device: torch.device, dtype: torch.dtype) -> BenchCase:
    hidden = shapes.linears[0][2]
    x, residual = (torch.randn(n, hidden, dtype=dtype, device=device) for _ in range(2))
    weight = torch.rand(hidden, dtype=dtype, device=device) + 0.5
    moved = 3 * size(x) + size(weight) + x.numel() + 4 * n
    return BenchCase("rms_norm int8", f"m{n}",
                     lambda at: rms_norm_levels(x, weight, 1e-5, torch.int8, residual)[0].values,
                     lambda at: _rounded(F.rms_norm(x + residual, (hidden,), weight, 1e-5))[0],
                     "add, norm, round", moved, moved, 0, 1, 1, 0.02, cold=False)


def _norm(shapes: ModelShapes, n: int, device: torch.device, dtype: torch.dtype) -> BenchCase:
    hidden = shapes.linears[0][2]
    x, residual = (torch.randn(n, hidden, dtype=dtype, device=device) for _ in range(2))
    weight = torch.rand(hidden, dtype=dtype, device=device) + 0.5
    moved = 4 * size(x) + size(weight)
    return BenchCase("rms_norm add", f"m{n}", lambda at: rms_norm(x, weight, 1e-5, residual)[0],
                     lambda at: F.rms_norm(x + residual, (hidden,), weight, 1e-5), "add, rms_norm",
                     moved, moved, 0, 1, 1, 0.02, cold=False)
