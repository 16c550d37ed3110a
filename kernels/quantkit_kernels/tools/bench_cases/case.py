"""One kernel on one shape, and what stands beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

Run = Callable[[int], torch.Tensor]
FLUSH = 256 << 20
"""Bytes read between two reads of the same weight: several times the largest cache of a GPU."""


@dataclass(frozen=True)
class ModelShapes:
    """Sizes of a model, and how much of it is run at once.

    Attributes:
        linears: name, outputs, inputs.
        rows: of activations.
        contexts: sequences, and tokens of each.
        heads, kv_heads, dim: of attention.
        flush: see :data:`FLUSH`.
    """

    linears: tuple[tuple[str, int, int], ...]
    rows: tuple[int, ...]
    contexts: tuple[tuple[int, int], ...]
    heads: int
    kv_heads: int
    dim: int
    flush: int = FLUSH


LLAMA_8B = ModelShapes((("qkv", 6144, 4096), ("o", 4096, 4096), ("gate up", 28672, 4096),
                        ("down", 4096, 14336), ("head", 128256, 4096)),
                       (1, 4, 16, 64, 256, 2048), ((1, 8192), (1, 32768), (16, 8192)), 32, 8, 128)
QUICK = replace(LLAMA_8B, linears=LLAMA_8B.linears[1:3], rows=(1, 16, 2048), contexts=((1, 32768),))
REHEARSAL = ModelShapes((("o", 200, 128),), (1, 20), ((1, 70),), 4, 2, 32, flush=40000)
"""Shapes for Triton's interpreter: to try a script before there is a GPU."""
HEAD_ROWS = 64
"""A head is only asked for the last token of each sequence."""


@dataclass(frozen=True)
class BenchCase:
    """One kernel on one shape, and what torch does instead.

    Attributes:
        kernel, shape: names.
        ours, theirs: run on the copy of that number, and return the result.
        baseline: what ``theirs`` is.
        bytes, their_bytes: that must be read and written, each once.
        flops: multiplications and additions of the product.
        copies, their_copies: of what is read.
        tolerance: the largest ``|ours − theirs| / |theirs|``, by 2-norm, that rounding explains.
        cold: whether all copies together are more than a GPU's cache holds. Activations aren't, nor are they
            when a model runs.
        check: both sides' results, if they are more than what ``ours`` and ``theirs`` return.
    """

    kernel: str
    shape: str
    ours: Run
    theirs: Run
    baseline: str
    bytes: int
    their_bytes: int
    flops: int
    copies: int
    their_copies: int
    tolerance: float
    cold: bool = True
    check: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None


def size(*tensors: torch.Tensor) -> int:
    """Bytes."""
    return sum(t.numel() * t.element_size() for t in tensors)


def copies(shapes: ModelShapes, size: int) -> int:
    """How many copies of something of ``size`` bytes a measurement cycles through."""
    return max(1, -(-shapes.flush // size))
