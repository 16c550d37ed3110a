"""Matrix products on the CPU by kernels of our own, straight from packed codes.

A weight is packed once, when a model is loaded. The kernels are in ``quantkit_kernels.cpu``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import mmap
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from quantkit.errors import UsageError, did_you_mean
from quantkit.formats.base import Codes, QuantizedTensor
from quantkit.formats.nf4_table import codebook
from quantkit.formats.trellis_code import HIGH, LOW, MIDDLE
from quantkit.ops import gpu
from quantkit.ops.dispatch import KernelQuery, codes_of

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


HALF = (torch.bfloat16, torch.float16)
"""Activations whose own rounding is about as coarse as that to the integers of a group of 32."""


class CpuKernel(ABC):
    """What the kernels have in common."""

    name = ""
    order = 40

    def declines(self, query: KernelQuery) -> str | None:
        """Anything but the weights that it has a decoder for, on a CPU."""
        if query.op != "linear":
            return f"implements linear, not {query.op}"
        if query.device != "cpu":
            return f"runs on cpu, not {query.device}"
        if query.dtype not in HALF:
            return f"takes bfloat16 or float16 activations, not {str(query.dtype).removeprefix('torch.')}"
        if gpu.SIMULATE and gpu.unavailable(query.device, query.dtype) is None:
            return "leaves it to the GPU's kernels, which are simulated"
        return unavailable() or self._declines(query)

    @abstractmethod
    def _declines(self, query: KernelQuery) -> str | None:
        """Why not these weights."""

    def prepare(self, weight: QuantizedTensor) -> CpuWeight:
        """Codes in the kernel's order."""
        packed = self._pack(codes_of(weight), weight)
        return dataclasses.replace(packed, rotated=weight.spec.rotation is not None)

    @abstractmethod
    def _pack(self, codes: Codes, weight: QuantizedTensor) -> CpuWeight:
        """Its codes, reordered."""

    def run(self, x: torch.Tensor, prepared: CpuWeight) -> torch.Tensor:
        """``x [m, k]`` → ``[m, n]`` in x's dtype."""
        from quantkit.ops.cpu_product import multiply

        return multiply(x, prepared)


class CpuInt8(CpuKernel):
    """8-bit symmetric integers, activations as 14-bit integers with a scale for each 32."""

    name = "cpu-int8"

    def _declines(self, query: KernelQuery) -> str | None:
        spec = query.spec
        if spec.kind != "int" or spec.bits not in (5, 6, 7, 8):
            return f"multiplies 8-bit integers, not {spec.kind}{spec.bits}"
        if not spec.symmetric:
            return "has no zero point"
        if spec.activations:
            return "leaves activations as they are"
        return _group_declines(query)

    def _pack(self, codes: Codes, weight: QuantizedTensor) -> CpuWeight:
        from quantkit_kernels.cpu import decoders, matmul, pack

        group = codes.spec.granularity.size or 0
        kind, scale = stored_scale(codes, weight)
        return CpuWeight(self.name, matmul.Matmul(decoders.INT8, group, kind), weight.shape,
                         padded(weight.shape[1], max(group, matmul.SUB)),
                         pack.int8(codes.codes, isa().lanes, max(group, matmul.SUB),
                                   2 ** (codes.spec.bits - 1)),
                         pack.scales(scale, isa().lanes))


class CpuInt4(CpuKernel):
    """Integers of up to 4 bits, with or without zero points, activations as int8 with a scale for each 32."""

    name = "cpu-int4"

    def _declines(self, query: KernelQuery) -> str | None:
        spec = query.spec
        if spec.kind != "int" or spec.bits > 4:
            return f"multiplies integers of at most 4 bits, not {spec.kind}{spec.bits}"
        return _group_declines(query)

    def _pack(self, codes: Codes, weight: QuantizedTensor) -> CpuWeight:
        from quantkit_kernels.cpu import decoders, matmul, pack

        group = codes.spec.granularity.size or 0
        kind, scale = stored_scale(codes, weight)
        level, zeros = codes.codes, None
        if codes.zero is None:
            if codes.spec.bits < 4:
                level = level + (8 - 2 ** (codes.spec.bits - 1))  # the kernel's middle is 8
        else:
            zeros = pack.scales(codes.zero.expand(scale.shape[0], -1), isa().lanes)
        return CpuWeight(self.name, matmul.Matmul(decoders.INT4, group, kind, zeros is not None),
                         weight.shape, padded(weight.shape[1], max(group, matmul.SUB)),
                         pack.int4(level, isa().lanes, max(group, matmul.SUB)),
                         pack.scales(scale, isa().lanes), zeros)


class CpuNF4(CpuKernel):
    """NF4 in blocks that don't cross rows, activations as 14-bit integers with a scale for each 32."""

    name = "cpu-nf4"

    def _declines(self, query: KernelQuery) -> str | None:
        if query.spec.kind != "nf":
            return f"multiplies nf, not {query.spec.kind}"
        size = query.spec.granularity.size or 0
        if query.k % size:
            return f"needs in_features divisible by the block of {size}, not {query.k}"
        return _group_declines(query)

    def _pack(self, codes: Codes, weight: QuantizedTensor) -> CpuWeight:
        from quantkit_kernels.cpu import decoders, matmul, pack

        group = codes.spec.granularity.size or 0
        table = tuple(codebook().tolist())
        scale = codes.scale.reshape(weight.shape[0], -1) / decoders.NF4_LEVELS
        return CpuWeight(self.name, matmul.Matmul(decoders.nf4(table), group), weight.shape,
                         padded(weight.shape[1], group), pack.nf4(codes.codes, isa().lanes, group),
                         pack.scales(scale, isa().lanes))


class CpuTrellis(CpuKernel):
    """A trellis, activations as 14-bit integers with a scale for each 32."""

    name = "cpu-trellis"

    def _declines(self, query: KernelQuery) -> str | None:
        return None if query.spec.kind == "trellis" else f"multiplies a trellis, not {query.spec.kind}"

    def _pack(self, codes: Codes, weight: QuantizedTensor) -> CpuWeight:
        from quantkit_kernels.cpu import decoders, matmul, pack

        spec = codes.spec
        assert spec.window is not None
        kind, scale = stored_scale(codes, weight)
        decoder = decoders.trellis(spec.bits, spec.window, (LOW, HIGH, MIDDLE))
        return CpuWeight(self.name, matmul.Matmul(decoder, 0, kind), weight.shape,
                         padded(weight.shape[1], matmul.SUB), pack.trellis(codes.codes, spec.bits),
                         pack.scales(scale, isa().lanes))


def _group_declines(query: KernelQuery) -> str | None:
    from quantkit_kernels.cpu.matmul import SUB

    granularity = query.spec.granularity
    if granularity.size is not None and granularity.size % SUB:
        return f"takes groups of a multiple of {SUB}, not {granularity}"
    return None


def stored_scale(codes: Codes, weight: QuantizedTensor) -> tuple[Literal['bf16', 'f32'], torch.Tensor]:
    """Scales ``[n, groups]`` as they are stored: 16 bits if nothing is lost by it."""
    scale = codes.scale.expand(weight.shape[0], -1) if codes.scale.dim() == 2 else codes.scale.expand(
        weight.shape[0]).unsqueeze(1)
    if codes.spec.scale_dtype == "bfloat16":
        return "bf16", scale.to(torch.bfloat16)
    return "f32", scale.float()


INT8, INT4, NF, TRELLIS = CpuInt8(), CpuInt4(), CpuNF4(), CpuTrellis()
