"""Rotations of rows."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit_kernels.tools.aot_cases.case import AotCase, made
from quantkit_kernels.triton import hadamard

FACTORS = {"signs_ptr": "*fp32", "mix_ptr": "*fp32"}


def cases(family: str) -> Iterator[AotCase]:
    """Heads and hidden states, whole and in parts; there and back."""
    for n in (64, 96, 128, 256, 4096, 14336, hadamard.WHOLE):
        for back in (False, True) if n <= 256 else (False,):
            constants = hadamard.constants(n)
            assert constants is not None
            yield made(f"hadamard{' back' * back} {n}", hadamard.rotate_kernel,
                       {"x_ptr": "*bf16", **FACTORS, "y_ptr": "*bf16", "m": "i32", "step": "i32"},
                       {"BACK": back, **constants}, multiples=("step",), wide_loads=1)
    for n in (11008, 28672, hadamard.LONGEST):
        parts, mixes = hadamard.part_constants(n)
        yield made(f"hadamard parts {n}", hadamard.parts_kernel,
                   {"x_ptr": "*bf16", "signs_ptr": "*fp32", "t_ptr": "*fp32", "m": "i32", "step": "i32"},
                   {"BACK": False, **parts}, multiples=("step",), wide_loads=1)
        yield made(f"hadamard mix {n}", hadamard.mix_kernel, {"t_ptr": "*fp32", **FACTORS, "y_ptr": "*bf16"},
                   {"BACK": False, **mixes})
