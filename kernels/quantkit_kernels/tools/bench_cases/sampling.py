"""Choosing the next tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quantkit_kernels.tools.bench_cases.case import HEAD_ROWS, BenchCase, ModelShapes, size
from quantkit_kernels.triton.argmax import argmax
from quantkit_kernels.triton.sampling import choose

TEMPERATURE, TOP_K, TOP_P, MIN_P = 0.8, 50, 0.95, 0.01


def cases(shapes: ModelShapes, device: torch.device, dtype: torch.dtype) -> Iterator[BenchCase]:
    """The most likely token, and one drawn, of as many rows as a head is asked for."""
    vocabulary = shapes.linears[-1][1]
    for rows in (rows for rows in shapes.rows if rows <= HEAD_ROWS):
        logits = 3 * torch.randn(rows, vocabulary, dtype=dtype, device=device)
        yield _argmax(logits)
        yield _choose(logits)


def _argmax(logits: torch.Tensor) -> BenchCase:
    def check() -> tuple[torch.Tensor, torch.Tensor]:
        highest = logits == logits.amax(-1, keepdim=True)
        return argmax(logits)[0] + 1, torch.stack([row.nonzero()[0, 0] for row in highest]) + 1  # none is 0

    return BenchCase("argmax", f"m{len(logits)}", lambda at: argmax(logits)[0],
                     lambda at: logits.argmax(-1), "argmax", size(logits), size(logits), 0, 1, 1, 0.0,
                     cold=False, check=check)


def _choose(logits: torch.Tensor) -> BenchCase:
    rows, device = len(logits), logits.device
    temperature, top_p, min_p = (torch.full((rows,), setting, device=device)
                                 for setting in (TEMPERATURE, TOP_P, MIN_P))
    top_k = torch.full((rows,), TOP_K, dtype=torch.int32, device=device)
    seed = torch.arange(rows, device=device)

    def ours(at: int) -> torch.Tensor:
        return choose(logits, temperature, seed, seed, top_k, top_p, min_p)[0]

    def chances() -> tuple[torch.Tensor, torch.Tensor]:
        scores, ids = (logits.float() / TEMPERATURE).sort(dim=-1, descending=True, stable=True)
        scores = scores.masked_fill(scores < scores[:, TOP_K - 1:TOP_K], -torch.inf)
        each = scores.softmax(-1)
        gone = (each.cumsum(-1) - each >= TOP_P) | (each < MIN_P * each[:, :1])
        return each.masked_fill(gone, 0.0), ids

    def theirs(at: int) -> torch.Tensor:
        each, ids = chances()
        return ids.gather(-1, torch.multinomial(each, 1))[:, 0]

    def check() -> tuple[torch.Tensor, torch.Tensor]:
        each, ids = chances()
        drawn = (each > 0) & (ids == ours(0)[:, None])
        return drawn.any(-1), torch.ones(rows, device=device)

    return BenchCase("sample", f"m{rows}", ours, theirs, "sort, multinomial", size(logits), size(logits), 0,
                     1, 1, 0.0, cold=False, check=check)
