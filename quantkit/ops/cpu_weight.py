"""Weights as CPU kernels read them, their activations, and the threads and instruction set they run on.

A weight is packed once, when a model is loaded. The kernels are in ``quantkit_kernels.cpu``.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from quantkit.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from quantkit_kernels.cpu.isa import Isa
    from quantkit_kernels.cpu.matmul import Matmul
    from quantkit_kernels.cpu.pool import Pool

ROWS = 128
"""Rows of activations in a unit: their codes stay in a core's own cache."""
UNITS = 32
"""Units that a thread has in a product with few rows, at most: the last even out what a busy core lost."""


@dataclass(frozen=True)
class CpuWeight:
    """A weight as a kernel reads it.

    Attributes:
        name: of the kernel, as it is shown.
        kernel: which multiplies by it.
        shape: logical ``(out, in)``.
        columns: padded to whole groups; activations must have as many.
        weights, scales, zeros: as ``quantkit_kernels.cpu.matmul`` wants them.
        rotated: whether it wants its inputs rotated.
    """

    name: str
    kernel: Matmul
    shape: tuple[int, int]
    columns: int
    weights: torch.Tensor
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    rotated: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes in memory, all of which a product reads."""
        return sum(t.numel() * t.element_size() for t in (self.weights, self.scales, self.zeros)
                   if t is not None)

    @property
    def stripes(self) -> int:
        """Padded rows, in units of the kernel's stripe."""
        from quantkit_kernels.cpu.matmul import STRIPE

        return -(-self.shape[0] // STRIPE)

    @property
    def arguments(self) -> dict[str, Any]:
        """What a program's operation needs to know of it."""
        from quantkit_kernels.cpu.matmul import SUB

        return {"weights": self.weights, "scales": self.scales, "zeros": self.zeros, "stripes": self.stripes,
                "subgroups": self.columns // SUB}

    @property
    def table(self) -> dict[str, Any]:
        """What an embedding's operation needs to know of it."""
        return {"table": self.weights, "scales": self.scales, "zeros": self.zeros, "columns": self.columns}

    def units(self, rows: int, threads: int) -> tuple[int, int, int]:
        """How a product is cut: units, stripes in each, rows in each."""
        from quantkit_kernels.cpu.matmul import STRIPE

        wide = rows if rows <= 16 else ROWS
        wanted = UNITS * threads if rows <= 16 else 4 * threads
        least = max(1, self.kernel.decoder.rows // STRIPE)  # what is unpacked together is not cut
        each = -(-self.stripes // (wanted * least)) * least
        return -(-self.stripes // each) * -(-rows // wide), each, wide


def lazy_zeros(*shape: int) -> torch.Tensor:
    """float32 zeros whose memory is taken when it is first written to, as far as it is."""
    # not calloc's: what that has at hand, it clears
    return torch.frombuffer(mmap.mmap(-1, 4 * math.prod(shape)), dtype=torch.float32).view(shape)


class Activations:
    """Room for rows of activations as a product reads them: codes, scales and sums, row after row.

    Args:
        packed: a weight; all of its family and width take the same.
        rows: of activations.

    Attributes:
        stride: bytes from row to row.
    """

    def __init__(self, packed: CpuWeight, rows: int) -> None:
        from quantkit_kernels.cpu.matmul import SUB, WIDTH

        width, subgroups = packed.columns * WIDTH[packed.kernel.decoder.family], packed.columns // SUB
        self.stride = -(-(width + 8 * subgroups) // 64) * 64
        self._room = lazy_zeros(rows * self.stride // 4 + 16).view(torch.uint8)
        base = -self._room.data_ptr() % 64
        self._parts = [self._room[base + offset:] for offset in (0, width, width + 4 * subgroups)]

    @property
    def written(self) -> dict[str, Any]:
        """Arguments of the row operation."""
        return dict(zip(("out", "scales", "sums"), self._parts)) | {"out_stride": self.stride}

    @property
    def read(self) -> dict[str, Any]:
        """Arguments of the product."""
        return dict(zip(("x", "x_scales", "x_sums"), self._parts)) | {"x_stride": self.stride}


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
        return next(one for one in ALL if not missing(one, features))
    table = {one.name: one for one in ALL}
    if named not in table:
        raise UsageError(f"QUANTKIT_ISA is {named!r}", why=did_you_mean(named, table))
    if lacking := missing(table[named], features):
        raise UsageError(f"QUANTKIT_ISA is {named!r}", why=f"this CPU lacks {', '.join(lacking)}",
                         next="unset QUANTKIT_ISA")
    return table[named]


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
def unavailable() -> str | None:
    """Why there are no CPU kernels here; ``None`` if there are."""
    import importlib.util

    return None if importlib.util.find_spec("llvmlite") else "llvmlite is not installed"


PLAIN: dict[torch.dtype, Literal["bf16", "f16", "f32"]] = {
    torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
"""The dtypes of plain weights that have a kernel, and what kernels call them."""


def pack_plain(weight: torch.Tensor, read: Callable[[], None] = lambda: None) -> CpuWeight:
    """A plain weight ``[out, in]`` of a dtype in :data:`PLAIN`; ``read`` is called now and then, when some of
    it was read."""
    from quantkit_kernels.cpu import decoders, matmul, pack

    shape, kind = (weight.shape[0], weight.shape[1]), PLAIN[weight.dtype]
    decoder = {"bf16": decoders.BF16, "f16": decoders.FP16, "f32": decoders.FP32}[kind]
    reorder = pack.bf16 if kind == "bf16" else pack.floats
    return CpuWeight(f"cpu-{kind}", matmul.Matmul(decoder, None), shape, padded(shape[1], matmul.SUB),
                     reorder(weight, isa().lanes, read))


def padded(columns: int, group: int) -> int:
    """Columns up to whole groups."""
    return -(-columns // group) * group
