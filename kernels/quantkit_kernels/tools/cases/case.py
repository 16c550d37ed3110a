"""A kernel that is compiled ahead of time, and a kernel that is measured: what each case says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

FAMILIES = {"sm_80": "ampere", "sm_86": "ampere", "sm_89": "ampere", "sm_120": "ampere",
            "sm_90": "hopper", "sm_100": "blackwell", "gfx942": "cdna"}
"""Targets that are compiled for: A100; cards of the series 30, 40 and 50; H100 and H200; B200; MI300."""
SHARED = {"sm_80": 163 << 10, "sm_86": 99 << 10, "sm_89": 99 << 10, "sm_120": 99 << 10, "sm_90": 227 << 10,
          "sm_100": 227 << 10, "gfx942": 64 << 10}
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


def aot_case(name: str, kernel: Any, signature: dict[str, str], constants: dict[str, Any],
             **about: Any) -> AotCase:
    """A case whose launch options stand among its compile-time arguments."""
    options = {key: constants[key] for key in OPTIONS if key in constants}
    rest = {key: value for key, value in constants.items() if key not in options}
    return AotCase(name, kernel, signature, rest, options, **about)


def absent_pointers(kernel: Any, given: Mapping[str, str]) -> dict[str, None]:
    """The pointers of a kernel that aren't given."""
    return {name: None for name in kernel.arg_names if name.endswith("_ptr") and name not in given}


def threads(options: dict[str, int], family: str) -> int:
    """Threads of a program."""
    return options["num_warps"] * (64 if family == "cdna" else 32)


Run = Callable[[int], torch.Tensor]
FLUSH = 256 << 20
"""Bytes read between two reads of the same weight: several times the largest cache of a GPU."""


@dataclass(frozen=True)
class ModelShapes:
    """Sizes of a model, and how much of it is run at once.

    Attributes:
        linears: name, outputs, inputs.
        rows: the numbers of rows of activations.
        contexts: sequences, and tokens of each.
        heads, kv_heads, dim: of attention.
        flush: bytes that are read between two reads of one weight.
    """

    linears: tuple[tuple[str, int, int], ...]
    rows: tuple[int, ...]
    contexts: tuple[tuple[int, int], ...]
    heads: int
    kv_heads: int
    dim: int
    flush: int = FLUSH

    @property
    def hidden(self) -> int:
        """Numbers of a hidden state."""
        return self.linears[0][2]


LLAMA_8B = ModelShapes((("qkv", 6144, 4096), ("o", 4096, 4096), ("gate up", 28672, 4096),
                        ("down", 4096, 14336), ("head", 128256, 4096)),
                       (1, 4, 16, 64, 256, 2048), ((1, 8192), (1, 32768), (16, 8192)), 32, 8, 128)
QUICK = replace(LLAMA_8B, linears=LLAMA_8B.linears[1:3], rows=(1, 16, 2048), contexts=((1, 32768),))
REHEARSAL = ModelShapes((("o", 200, 128),), (1, 20), ((1, 70),), 4, 2, 32, flush=40000)
"""Shapes for Triton's interpreter: to try a script before there is a GPU."""
HEAD_ROWS = 64
"""A head is only asked for the last token of each sequence."""


@dataclass(frozen=True)
class BenchSetup:
    """What cases are made for: shapes, the device, and the dtype of activations."""

    shapes: ModelShapes
    device: torch.device
    dtype: torch.dtype

    def with_rows(self, *rows: int) -> BenchSetup:
        """The same with other numbers of rows."""
        return replace(self, shapes=replace(self.shapes, rows=rows))

    def normal(self, *size: int) -> torch.Tensor:
        """Normal numbers in the dtype of activations."""
        return torch.randn(*size, dtype=self.dtype, device=self.device)

    def copies(self, size: int) -> int:
        """How many copies of something of ``size`` bytes a measurement cycles through."""
        return max(1, -(-self.shapes.flush // size))


@dataclass(frozen=True)
class BenchCase:
    """One kernel on one shape, and what torch does instead.

    Attributes:
        kernel, shape: names.
        ours, theirs: run on the copy of that number, and return the result.
        baseline: the name of what ``theirs`` runs.
        bytes, their_bytes: that must be read and written, each once.
        flops: multiplications and additions of the product.
        copies, their_copies: of what is read.
        tolerance: the largest ``|ours − theirs| / |theirs|``, by 2-norm, that rounding explains.
        cold: whether all copies together are more than a GPU's cache holds. Activations aren't, nor are they
            when a model runs.
        check: both sides' results, if they are more than what ``ours`` and ``theirs`` return.
    """

    kernel: str
    shape: str
    ours: Run
    theirs: Run
    baseline: str
    bytes: int
    their_bytes: int
    flops: int = 0
    copies: int = 1
    their_copies: int = 1
    tolerance: float = 0.02
    cold: bool = True
    check: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None


def size(*tensors: torch.Tensor) -> int:
    """Bytes."""
    return sum(t.numel() * t.element_size() for t in tensors)
