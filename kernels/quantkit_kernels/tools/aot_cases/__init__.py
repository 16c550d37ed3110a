"""Which kernels are compiled ahead of time, and how: the shapes of an 8B Llama, launched as in production.

Compile-time arguments come from the same functions that launch the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit_kernels.tools.aot_cases import (
    attention,
    gptq,
    hadamard,
    kv_write,
    products,
    rows,
    sampling,
    w4a4,
)
from quantkit_kernels.tools.aot_cases.case import FAMILIES, SHARED, AotCase

__all__ = ["FAMILIES", "SHARED", "AotCase", "cases"]


def cases(target: str) -> Iterator[AotCase]:
    """Everything that ships for ``sm_80``, ``sm_90``, ``sm_100`` or ``gfx942``."""
    for part in (products, rows, hadamard, kv_write, attention, sampling, gptq, w4a4):
        yield from part.cases(FAMILIES[target])
