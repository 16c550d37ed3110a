"""Programs of one kernel whose parts the last of them to arrive puts together, instead of a second kernel.

Each stores its part and counts itself. Which one is last differs from launch to launch, but it only says who
goes on: parts are read back and added in an order of their own, so the same input always gives the same bits.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

COUNTERS = 1 << 14
"""Groups of programs that a kernel can have."""
STORED = tl.constexpr("s_waitcnt vmcnt(0)\nv_mov_b32 $0, $1")
"""Waits until a wave's stores have come to the cache that the GPU shares; AMD's barrier doesn't."""


@functools.cache
def counters(device: torch.device) -> torch.Tensor:
    """A device's counters, int32 ``[COUNTERS]``: all 0, and 0 again when a kernel has ended.

    All kernels of a device share them, graphs too, so these run one after another, on one stream. They are
    allocated with the first launch, which is never part of a graph: a kernel can't be loaded while one is
    captured.
    """
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


@triton.jit
def is_last(count_ptr: tl.tensor, count: tl.tensor, CDNA: tl.constexpr) -> tl.tensor:
    """Whether this program is the last of ``count`` that count themselves here. It sets the counter back, and
    may load what the others stored before.

    The barrier puts the stores of all of a program's threads before the one atomic operation, which releases
    them to the whole GPU. The last program's acquires what all before it released, and drops what its
    multiprocessor's cache had; its other threads wait for the result, so their loads come after it too. CDNA:
    compiled for AMD's GPUs.
    """
    if CDNA:
        tl.inline_asm_elementwise(STORED, "=v,v", [tl.full([], 0, tl.int32)], tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()
    last = tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu") == count - 1
    if last:
        tl.store(count_ptr, 0)
    return last
