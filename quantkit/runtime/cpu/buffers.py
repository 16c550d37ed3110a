"""Rows of activations between a program's operations, and memory that is given back to the system."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Sequence

import torch

from quantkit.models.decoder import DecoderLayer
from quantkit.models.layers import MLP
from quantkit.models.linear import Linear
from quantkit.ops.cpu_machine import lazy_zeros
from quantkit.ops.linear_weight import LinearWeight
from quantkit.ops.stored_weight import PlainWeight
from quantkit.runtime.memory.scratch import CPU_ROWS as MAX_ROWS
from quantkit.runtime.memory.scratch import buffer_width, result_widths


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
    widths = result_widths(writers, readers, sizes)
    if len(widths) == len(sizes):
        return [lazy_zeros(MAX_ROWS, width) for width in widths]
    joined = lazy_zeros(MAX_ROWS, widths[0])
    return [joined[:, start:] for start in itertools.accumulate(sizes[:-1], initial=0)]


def buffer(writers: Sequence[Linear], readers: Sequence[Linear], size: int = 0) -> torch.Tensor:
    """float32 ``[MAX_ROWS, …]``, wide enough for these Linears; the padding of a row stays 0."""
    return lazy_zeros(MAX_ROWS, buffer_width(writers, readers, size))


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
