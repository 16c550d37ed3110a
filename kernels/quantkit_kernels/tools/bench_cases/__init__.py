"""What :mod:`~quantkit_kernels.tools.bench` measures: every kernel at the shapes of an 8B Llama, beside
torch.

Weights, keys and values exist in enough copies that a GPU's cache holds nothing of one when it is read
again, as when a whole model is run. Both sides compute the same numbers, so that they can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from quantkit_kernels.tools.bench_cases import attention, gptq, hadamard, kv_write, products, rows, sampling
from quantkit_kernels.tools.bench_cases.case import LLAMA_8B, QUICK, REHEARSAL, BenchCase, ModelShapes, Run

__all__ = ["LLAMA_8B", "QUICK", "REHEARSAL", "BenchCase", "ModelShapes", "Run", "cases"]


FIRST = (1, 16, 64, 4, 256)
"""Rows of activations by importance: one sequence, then batches."""


def cases(shapes: ModelShapes, device: torch.device, dtype: torch.dtype) -> Iterator[BenchCase]:
    """Every kernel, the most important first: products of one row, decoding attention, products of more rows,
    what is between, prompts. What a case needs is made when its turn comes."""
    by_rank = sorted(shapes.rows, key=lambda m: (FIRST.index(m) if m in FIRST else len(FIRST), m))
    few = [m for m in by_rank if m <= max(FIRST)]
    for at, m in enumerate(few):
        yield from products.cases(replace(shapes, rows=(m,)), device, dtype)
        if at == 0:
            yield from attention.cases(shapes, device, dtype)
    for part in (kv_write, rows, hadamard, sampling, gptq):
        yield from part.cases(shapes, device, dtype)
    yield from products.cases(replace(shapes, rows=tuple(m for m in by_rank if m not in few)), device, dtype)
