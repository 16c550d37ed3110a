"""What is done to rows of activations between products."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit_kernels.tools.aot_cases.case import AotCase, made
from quantkit_kernels.triton import dependent, levels, rms_norm


def cases(family: str) -> Iterator[AotCase]:
    """Norms and levels."""
    kinds = {"int8": "*i8", "e4m3": "*fp8e4nv" if family in ("hopper", "blackwell") else "*fp16"}
    for n in (4096, levels.LONGEST):
        constants = levels.constants(n, family in dependent.FAMILIES)
        for add in (False, True):
            for kind in ("", *kinds):
                pointers = {"y_ptr": kinds.get(kind, "*bf16"), **({"t_ptr": "*fp32"} if kind else {}),
                            **({"r_ptr": "*bf16", "h_ptr": "*bf16"} if add else {})}
                absent = {key: None for key in ("r_ptr", "h_ptr", "t_ptr") if key not in pointers}
                yield made(f"rms_norm{' add' * add}{kind and ' '}{kind} {n}", rms_norm.rms_norm_kernel,
                           {"x_ptr": "*bf16", "w_ptr": "*bf16", "eps": "fp32", **pointers},
                           {**absent, **constants}, wide_loads=1)
        for kind, pointer in kinds.items():
            yield made(f"quantize {kind} {n}", levels.quantize_kernel,
                       {"x_ptr": "*bf16", "l_ptr": pointer, "t_ptr": "*fp32", "x_row": "i32"}, constants,
                       multiples=("x_row",), wide_loads=1)
