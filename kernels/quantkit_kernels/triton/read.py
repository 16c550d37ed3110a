"""Reads memory as fast as a GPU can and does next to nothing with it: the ceiling of what reads bind."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 8192
"""Words that one program reads, all of them at once."""


@triton.jit
def read_kernel(x_ptr: tl.tensor, y_ptr: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    """y ``[programs]``: the exclusive or of the words of each program; x is int32 ``[size]``."""
    program = tl.program_id(0).to(tl.int64)
    at = program * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < size, other=0, eviction_policy="evict_first")
    tl.store(y_ptr + program, tl.xor_sum(x, 0))


def read(x: torch.Tensor) -> torch.Tensor:
    """Read int32 ``[size]``; returns the exclusive or of the words of each block."""
    y = torch.empty(-(-x.numel() // BLOCK), dtype=torch.int32, device=x.device)
    read_kernel[(len(y),)](x, y, x.numel(), BLOCK=BLOCK, num_warps=8)
    return y
