"""Rows of activations between a program's operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quantkit.models.decoder import DecoderLayer
from quantkit.models.layers import MLP
from quantkit.models.linear import Linear
from quantkit.ops.cpu_linear import CpuWeight, lazy_zeros

MOST_ROWS = 512
"""Tokens that go through the program at once."""


def packed_of(linear: Linear) -> CpuWeight:
    """A Linear's packed weight. Raises TypeError if it isn't."""
    if not isinstance(linear.weight, CpuWeight):
        raise TypeError(f"{linear.name} isn't packed")
    return linear.weight


def key_of(weight: CpuWeight) -> tuple[Any, int, int]:
    """How it wants rows: the kind of its kernel, columns, the width that is rotated or 0."""
    return weight.kernel.decoder.family, weight.columns, weight.shape[1] if weight.rotated else 0


def stride_of(x: torch.Tensor) -> int:
    """Bytes from row to row."""
    return x.stride(0) * x.element_size()


def mlp_of(layer: DecoderLayer) -> MLP:
    """A layer's MLP: models with experts are declined."""
    assert isinstance(layer.mlp, MLP)
    return layer.mlp


def buffers(made_by: Sequence[Sequence[Linear]], read_by: Sequence[Linear],
            sizes: Sequence[int]) -> list[torch.Tensor]:
    """A buffer for each result of what sees one input; they are parts of one, where one Linear gives all.

    Args:
        made_by: of every layer, a Linear for each result, or one that gives them side by side.
        read_by: what reads any of them.
        sizes: of the results.

    Returns:
        float32 ``[MOST_ROWS, …]`` each.
    """
    if len(made_by[0]) == len(sizes):
        return [buffer([ones[i] for ones in made_by], read_by) for i in range(len(sizes))]
    assert all(len(ones) == 1 for ones in made_by)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    room = max([starts[-1], *(starts[-1] + packed_of(one).columns for one in read_by)])
    whole = buffer([ones[0] for ones in made_by], [], room)
    return [whole[:, start:] for start in starts]


def buffer(made_by: Sequence[Linear], read_by: Sequence[Linear], size: int = 0) -> torch.Tensor:
    """float32 ``[MOST_ROWS, …]`` that those Linears write and these read; what pads a row stays 0."""
    from quantkit_kernels.cpu.matmul import STRIPE

    width = max([size, *(packed_of(one).stripes * STRIPE for one in made_by),
                 *(packed_of(one).columns for one in read_by)])
    return lazy_zeros(MOST_ROWS, -(-width // 16) * 16)
