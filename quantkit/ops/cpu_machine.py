"""The CPU that kernels run on: its instruction set, the threads that all models share, and their memory."""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from quantkit.support.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from quantkit_kernels.cpu.isa import Isa
    from quantkit_kernels.cpu.pool import Pool


@functools.cache
def isa() -> Isa:
    """The best instruction set of this machine, or the one that ``QUANTKIT_ISA`` names.

    Raises:
        UsageError: it names one that is unknown, or that this CPU doesn't have.
    """
    from quantkit_kernels.cpu.isa import ALL, host_features, missing

    features = host_features()
    named = os.environ.get("QUANTKIT_ISA")
    if named is None:
        return next(isa for isa in ALL
                    if not missing(isa, features) and (not isa.amx or reason_against_tiles() is None))
    table = {isa.name: isa for isa in ALL}
    if named not in table:
        raise UsageError(f"QUANTKIT_ISA is {named!r}", why=did_you_mean(named, table))
    if lacking := missing(table[named], features):
        raise UsageError(f"QUANTKIT_ISA is {named!r}", why=f"this CPU lacks {', '.join(lacking)}",
                         next="unset QUANTKIT_ISA")
    if table[named].amx and (reason := reason_against_tiles()) is not None:
        raise UsageError(f"QUANTKIT_ISA is {named!r}", why=reason, next="unset QUANTKIT_ISA")
    return table[named]


@functools.cache
def reason_against_tiles() -> str | None:
    """Why AMX isn't used on a CPU that has it; ``None`` if it is: the system permits it, and a product is
    right."""
    from quantkit_kernels.cpu import amx, decoders, isa, matmul, tiles
    from quantkit_kernels.cpu.pool import Pool
    from quantkit_kernels.cpu.program import Program

    if not tiles.permitted():
        return "the system doesn't permit AMX's tiles"
    make = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(32, 64, generator=make).bfloat16() for _ in range(2))
    out, program = torch.zeros(32, 32), Program(isa.AMX)
    program.add(matmul.Matmul(decoders.BF16, None), weights=weight, x=x, x_stride=128, out=out,
                out_stride=128, stripes=1, stripes_a_unit=1, subgroups=2, rows=32, rows_a_unit=32,
                scratch=torch.zeros(amx.SCRATCH_BYTES, dtype=torch.uint8))
    program.finish()
    Pool(1).run(program.records)
    right = torch.allclose(out.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)
    return None if right else "AMX's products are wrong here"


def pool() -> Pool:
    """The threads that all models of this process share: as many as torch has when the first is loaded, and
    no more than this process may use at once."""
    with _making:
        return _pool()


@functools.cache
def _pool() -> Pool:
    from quantkit_kernels.cpu.pool import Pool, cores

    return Pool(min(torch.get_num_threads(), cores()))


_making = threading.Lock()


@functools.cache
def reason_against_kernels() -> str | None:
    """Why there are no CPU kernels here; ``None`` if there are."""
    import importlib.util

    return None if importlib.util.find_spec("llvmlite") else "llvmlite is not installed"


def lazy_zeros(*shape: int) -> torch.Tensor:
    """float32 zeros whose memory is taken when it is first written to, as far as it is."""
    # not calloc's: what that has at hand, it clears
    return torch.frombuffer(mmap.mmap(-1, 4 * math.prod(shape)), dtype=torch.float32).view(shape)


def trim_heap() -> None:
    """Return what the C library keeps of freed memory; where it can't be asked, nothing happens."""
    if (function := _malloc_trim()) is not None:
        function(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim = ctypes.CDLL(None).malloc_trim  # glibc's
    except (OSError, AttributeError, TypeError):
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    function: Callable[[int], int] = trim
    return function
