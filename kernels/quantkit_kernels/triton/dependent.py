"""Kernels that begin before the one before them has ended: programmatic dependent launch, from Hopper on.

A kernel launched with ``launch_pdl`` may run while its predecessor does, as soon as all programs of that one
have called :func:`let_next_begin` or ended. Until :func:`wait` it may read only what no kernel writes: here
weights, whose first bytes come into the L2 cache meanwhile. Every program of such a kernel waits, so whatever
was launched before it in the stream has ended, its predecessor's predecessors too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quantkit_kernels.triton.fragment import family_of

FAMILIES = ("hopper", "blackwell")
"""Of GPUs that can."""
LINES = tl.constexpr(256)
"""Of 128 bytes, that a program fetches before it waits: a few tiles."""


def starts(device: torch.device) -> bool:
    """Whether kernels there say that the next one may begin: it is only an instruction if none does."""
    return device.type == "cuda" and family_of(device) in FAMILIES


@triton.jit
def let_next_begin() -> None:
    """The next kernel may begin, if it was launched so; where it wasn't, nothing happens."""
    gdc_launch_dependents()


@triton.jit
def wait() -> None:
    """All that the kernels before wrote can be read from here on."""
    gdc_wait()


@triton.jit
def fetch(start: tl.tensor, count: tl.tensor) -> None:
    """Bring what lies at ``start`` into the L2 cache: at most ``count`` numbers, at least 128 bytes."""
    EACH: tl.constexpr = 1024 // start.dtype.element_ty.primitive_bitwidth
    line = tl.minimum(tl.arange(0, LINES), count // EACH - 1)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l",
                              [(start + line * EACH).to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)
