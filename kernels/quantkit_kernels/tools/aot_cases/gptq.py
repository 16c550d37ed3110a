"""GPTQ's inner loop."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit_kernels.tools.aot_cases.case import AotCase, made
from quantkit_kernels.triton import gptq


def cases(family: str) -> Iterator[AotCase]:
    """The blocks of columns that solvers ask for."""
    floats = ("work_ptr", "corner_ptr", "scale_ptr", "zero_ptr", "level_ptr", "error_ptr")
    steps = ("work_step", "level_step", "error_step")
    numbers = ("n", "out", "groups", *steps)
    for n in (gptq.LONGEST, gptq.LONGEST // 2):
        yield made(f"gptq {n} columns", gptq.solve_block_kernel,
                   {**dict.fromkeys(floats, "*fp32"), "group_ptr": "*i64", **dict.fromkeys(numbers, "i32")},
                   gptq.constants(n, 4), multiples=("out", "groups", *steps))
