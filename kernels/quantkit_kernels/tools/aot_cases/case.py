"""A kernel that is compiled ahead of time, and what is expected of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

FAMILIES = {"sm_80": "ampere", "sm_89": "ampere", "sm_120": "ampere", "sm_90": "hopper",
            "sm_100": "blackwell", "gfx942": "cdna"}
SHARED = {"sm_80": 163 << 10, "sm_89": 99 << 10, "sm_120": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10,
          "gfx942": 64 << 10}
"""Bytes of shared memory that a block may have."""
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32",
            torch.int64: "*i64", torch.int16: "*i16", torch.int8: "*i8", torch.uint8: "*u8",
            torch.float8_e4m3fn: "*fp8e4nv"}
OPTIONS = ("num_warps", "maxnreg", "enable_fp_fusion", "matrix_instr_nonkdim", "launch_pdl")


@dataclass(frozen=True)
class AotCase:
    """A kernel, its arguments and what is expected of it.

    Attributes:
        name: unique for a target.
        kernel: the jitted function.
        signature: type of every runtime argument.
        constants: value of every compile-time argument.
        options: ``num_warps`` and the like.
        multiples: runtime integers that are multiples of 16 in production. Pointers always are.
        wide_loads: the fewest 128-bit loads in the loop: those of the weights, or of keys and values.
        narrow: the most copies of less than 128 bits in the loop, on NVIDIA's GPUs.
        matrix: whether tensor cores are meant.
        ptx: words that NVIDIA's intermediate code is meant to have, in a line each.
        weights: numbers that a thread decodes in one turn of the loop.
        most: instructions a weight, at most, on sm_90.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int]
    multiples: tuple[str, ...] = ()
    wide_loads: int = 0
    narrow: int | None = None
    matrix: bool = False
    ptx: tuple[str, ...] = ()
    weights: float | None = None
    most: float | None = None


def made(name: str, kernel: Any, signature: dict[str, str], constants: dict[str, Any],
         **about: Any) -> AotCase:
    """Splits launch options from compile-time arguments."""
    options = {key: constants[key] for key in OPTIONS if key in constants}
    rest = {key: value for key, value in constants.items() if key not in options}
    return AotCase(name, kernel, signature, rest, options, **about)


def threads(options: dict[str, int], family: str) -> int:
    """Threads of a program."""
    return options["num_warps"] * (64 if family == "cdna" else 32)
