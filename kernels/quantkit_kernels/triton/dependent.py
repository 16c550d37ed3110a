"""Programmatic dependent launch, from Hopper on: a kernel begins before its predecessor has ended.

A kernel launched with ``launch_pdl`` may start as soon as all programs of its predecessor have called
:func:`let_next_begin` or ended. Until it calls :func:`wait` it may read only what no kernel writes: here
weights, whose first bytes are fetched into the L2 cache meanwhile. Every program of such a kernel calls
:func:`wait`, so everything that was launched before it in the stream has ended, including the predecessors of
its predecessor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quantkit_kernels.triton.fragment import family_of

FAMILIES = ("hopper", "blackwell")
"""Families of GPUs that support it."""
LINES = tl.constexpr(256)
"""Cache lines of 128 bytes that a program fetches before it waits: a few tiles."""


def starts(device: torch.device) -> bool:
    """Whether kernels on this device let the next one begin early. It costs an instruction if none does."""
    return device.type == "cuda" and family_of(device) in FAMILIES


@triton.jit
def let_next_begin() -> None:
    """Let the next kernel begin if it was launched with ``launch_pdl``; otherwise nothing happens."""
    gdc_launch_dependents()


@triton.jit
def wait() -> None:
    """Wait until everything that earlier kernels wrote can be read."""
    gdc_wait()


@triton.jit
def fetch(start: tl.tensor, count: tl.tensor) -> None:
    """Prefetch numbers from ``start`` on into the L2 cache: at most ``count`` of them, at least 128 bytes."""
    EACH: tl.constexpr = 1024 // start.dtype.element_ty.primitive_bitwidth
    line = tl.minimum(tl.arange(0, LINES), count // EACH - 1)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l",
                              [(start + line * EACH).to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)
