"""Rows of activations between a program's operations, and memory that is given back to the system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch

from quantkit.models.decoder import DecoderLayer
from quantkit.models.layers import MLP
from quantkit.models.linear import Linear
from quantkit.ops.cpu_machine import lazy_zeros
from quantkit.ops.cpu_weight import CpuWeight
from quantkit.ops.linear_weight import LinearWeight
from quantkit.ops.stored_weight import PlainWeight

MAX_ROWS = 512
"""Tokens that go through the program at once, at most."""


def packed_of(linear: Linear, high: bool = False) -> CpuWeight:
    """A Linear's packed weight, or with ``high`` its high halves if it has any. Raises TypeError if it isn't
    packed."""
    if not isinstance(linear.weight, CpuWeight):
        raise TypeError(f"{linear.name} isn't packed")
    return linear.weight.high() if high else linear.weight


def plain_of(table: LinearWeight) -> torch.Tensor:
    """An embedding's tensor. Raises TypeError if it isn't plain."""
    if not isinstance(table, PlainWeight):
        raise TypeError("the embedding is neither plain nor packed")
    return table.tensor


def stride_of(x: torch.Tensor) -> int:
    """Bytes from row to row."""
    return x.stride(0) * x.element_size()


def mlp_of(layer: DecoderLayer) -> MLP:
    """A layer's MLP. Models with experts are declined before."""
    assert isinstance(layer.mlp, MLP)
    return layer.mlp


def buffers(writers: Sequence[Sequence[Linear]], readers: Sequence[Linear],
            sizes: Sequence[int]) -> list[torch.Tensor]:
    """A buffer for each result of the Linears that read the same input.

    Where one Linear computes all results side by side, the buffers are parts of one.

    Args:
        writers: for every layer, a Linear for each result, or one for all of them.
        readers: what reads any of the buffers.
        sizes: of the results.

    Returns:
        float32 ``[MAX_ROWS, …]`` each.
    """
    if len(writers[0]) == len(sizes):
        return [buffer([linears[i] for linears in writers], readers) for i in range(len(sizes))]
    assert all(len(linears) == 1 for linears in writers)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    width = max([starts[-1], *(starts[-1] + packed_of(linear).columns for linear in readers)])
    joined = buffer([linears[0] for linears in writers], [], width)
    return [joined[:, start:] for start in starts]


def buffer(writers: Sequence[Linear], readers: Sequence[Linear], size: int = 0) -> torch.Tensor:
    """float32 ``[MAX_ROWS, …]``, wide enough for these Linears; the padding of a row stays 0."""
    from quantkit_kernels.cpu.weight_decoder import STRIPE

    width = max([size, *(packed_of(linear).stripes * STRIPE for linear in writers),
                 *(packed_of(linear).columns for linear in readers)])
    return lazy_zeros(MAX_ROWS, -(-width // 16) * 16)


def trim_heap() -> None:
    """Return what the C library keeps of freed memory; where it can't be asked, nothing happens."""
    if (function := _malloc_trim()) is not None:
        function(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim = ctypes.CDLL(None).malloc_trim  # glibc's
    except (OSError, AttributeError, TypeError):
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    function: Callable[[int], int] = trim
    return function
