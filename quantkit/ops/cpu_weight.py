"""Weights as our CPU kernels read them, their activations, and the product of both.

A weight is packed once, when a model is loaded. The kernels are in ``quantkit_kernels.cpu``.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from quantkit.ops.cpu_machine import isa, lazy_zeros, pool
from quantkit.ops.dispatch import DECODE_ROWS, Phase
from quantkit.ops.hadamard import apply_hadamard
from quantkit.support.progress import tell_compiling

if TYPE_CHECKING:
    from quantkit_kernels.cpu.matmul import Matmul
    from quantkit_kernels.cpu.weight_decoder import Family

UNITS = 32
"""Units that a thread has in a product with few rows, at most: the last even out what a busy core lost."""
KEPT = 8
"""Shapes of weights whose products with few rows a thread keeps ready."""


class InputKey(NamedTuple):
    """Weights with the same key read the same activations: the kernel's family, the columns, and the width
    that is rotated, or 0."""

    family: Family
    columns: int
    rotated: int


class ProductUnits(NamedTuple):
    """How a product is cut: the number of units, and stripes and rows in each."""

    units: int
    stripes: int
    rows: int


@dataclass(frozen=True)
class CpuWeight:
    """A weight as a kernel reads it.

    Attributes:
        name: the kernel's name, as it is shown.
        kernel: the kernel that multiplies by it.
        shape: logical ``(out, in)``.
        columns: padded to whole groups; activations must have as many.
        weights, scales, zeros: as ``quantkit_kernels.cpu.matmul`` wants them.
        outer: numbers that scales are multiples of, likewise.
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
    outer: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in memory, all of which a product reads."""
        return sum(t.numel() * t.element_size() for t in (self.weights, self.scales, self.outer, self.zeros)
                   if t is not None)

    @property
    def input_key(self) -> InputKey:
        """What activations it reads."""
        return InputKey(self.kernel.decoder.family, self.columns, self.shape[1] if self.rotated else 0)

    @property
    def stripes(self) -> int:
        """Padded rows, in units of the kernel's stripe."""
        from quantkit_kernels.cpu.weight_decoder import STRIPE

        return -(-self.shape[0] // STRIPE)

    @property
    def arguments(self) -> dict[str, Any]:
        """What a program's operation needs to know of it."""
        from quantkit_kernels.cpu.weight_decoder import SUB

        return {"weights": self.weights, "scales": self.scales, "outer": self.outer, "zeros": self.zeros,
                "stripes": self.stripes, "subgroups": self.columns // SUB}

    @property
    def table(self) -> dict[str, Any]:
        """What an embedding's operation needs to know of it."""
        return {"table": self.weights, "scales": self.scales, "outer": self.outer, "zeros": self.zeros,
                "columns": self.columns}

    @property
    def has_planes(self) -> bool:
        """Whether its high halves can be read alone."""
        return self.kernel.decoder.planes == 2

    def in_planes(self) -> CpuWeight:
        """The same weight, its high halves apart from its low ones, in as much memory; itself if it isn't
        int8 or has zero points or minima."""
        from quantkit_kernels.cpu import decoders, pack

        if self.kernel.decoder != decoders.INT8 or self.kernel.zeros or self.kernel.scales.minima:
            return self
        kernel = dataclasses.replace(self.kernel, decoder=decoders.INT8_PLANES)
        return dataclasses.replace(self, kernel=kernel, weights=pack.int8_planes(self.weights, isa().lanes))

    def high(self) -> CpuWeight:
        """What its high halves say of it, 4 bits of 8, in its own memory; itself if it has no planes."""
        from quantkit_kernels.cpu import decoders

        if not self.has_planes:
            return self
        kernel = dataclasses.replace(self.kernel, decoder=decoders.INT4, high=True)
        return dataclasses.replace(self, name="cpu-int4", kernel=kernel,
                                   weights=self.weights[:self.weights.numel() // 2])

    def kernel_name(self, dtype: torch.dtype, device: torch.device, phase: Phase) -> str:
        """See :class:`~quantkit.ops.linear_weight.LinearWeight`: one kernel serves both phases."""
        return self.name

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = multiply(apply_hadamard(rows) if self.rotated else rows, self)
        if bias is not None:
            y = y + bias
        return y.reshape(*x.shape[:-1], self.shape[0])

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """See :class:`~quantkit.ops.linear_weight.LinearWeight`; float32."""
        from quantkit_kernels.cpu.embedding import Embed
        from quantkit_kernels.cpu.program import Program

        ids = ids.contiguous()
        out = torch.empty(len(ids), self.columns)
        program = Program(isa())
        program.add(Embed(self.kernel), len(ids), ids=ids, out=out, size=self.shape[1], padded=self.columns,
                    out_stride=self.columns * 4, **self.table)
        program.finish(tell_compiling)
        pool().run(program.records)
        return out[:, :self.shape[1]]

    def units(self, rows: int, threads: int, tiles: int = 1) -> ProductUnits:
        """How a product with this number of rows is cut; ``tiles``: how many such are multiplied together."""
        from quantkit_kernels.cpu.product_spec import MOST_ROWS
        from quantkit_kernels.cpu.weight_decoder import STRIPE

        wide = rows if rows <= 16 else MOST_ROWS
        wanted = UNITS * threads if rows <= 16 else 4 * threads
        least = max(1, self.kernel.decoder.rows // STRIPE)  # what is unpacked together is not cut
        each = -(-self.stripes // (max(1, wanted // tiles) * least)) * least
        return ProductUnits(-(-self.stripes // each) * -(-rows // wide), each, wide)


class Activations:
    """Room for rows of activations as a product reads them: codes, scales, sums and sums of halves, row
    after row.

    Args:
        packed: a weight; all of its family and width take the same.
        rows: the number of rows of activations.

    Attributes:
        stride: bytes from row to row.
    """

    def __init__(self, packed: CpuWeight, rows: int) -> None:
        from quantkit_kernels.cpu.weight_decoder import SUB

        width, subgroups = packed.columns * packed.kernel.decoder.family.width, packed.columns // SUB
        self.stride = -(-(width + 16 * subgroups) // 64) * 64
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


PLAIN: dict[torch.dtype, Literal["bf16", "f16", "f32"]] = {
    torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
"""The dtypes of plain weights that have a kernel, and what kernels call them."""


def pack_plain(weight: torch.Tensor, read: Callable[[], None] = lambda: None) -> CpuWeight:
    """A plain weight ``[out, in]`` of a dtype in :data:`PLAIN`; ``read`` is called now and then, when some of
    it was read."""
    from quantkit_kernels.cpu import decoders, matmul, pack
    from quantkit_kernels.cpu.weight_decoder import SUB

    kind = PLAIN[weight.dtype]
    decoder = {"bf16": decoders.bf16(isa()), "f16": decoders.FP16, "f32": decoders.FP32}[kind]
    return CpuWeight(f"cpu-{kind}", matmul.Matmul(decoder, None), (weight.shape[0], weight.shape[1]),
                     padded(weight.shape[1], SUB), pack.rows(weight, read))


def padded(columns: int, group: int) -> int:
    """Columns up to whole groups."""
    return -(-columns // group) * group


class CpuProduct:
    """A product with a packed weight, ready to be run again and again.

    Args:
        packed: the weight, which whoever calls keeps alive.
        rows: the largest number of rows of activations.
    """

    @torch.inference_mode(False)  # else its memory couldn't be written to outside of that mode
    def __init__(self, packed: CpuWeight, rows: int) -> None:
        from quantkit_kernels.cpu.matmul import scratch_bytes
        from quantkit_kernels.cpu.program import Program
        from quantkit_kernels.cpu.rows import RowKernel
        from quantkit_kernels.cpu.weight_decoder import STRIPE, SUB

        machine, threads = isa(), pool().threads
        subgroups, padded = packed.columns // SUB, packed.stripes * STRIPE
        self._like = dataclasses.replace(packed, weights=torch.empty(0), scales=None, zeros=None, outer=None)
        self._rows, self._threads = 0, threads
        with torch.inference_mode(False):  # a product made in that mode is used outside of it too
            self._x = torch.zeros(rows, packed.columns)
            self._out = torch.empty(rows, padded)
        codes = Activations(packed, max(rows, threads))
        scratch = torch.empty(threads, scratch_bytes(packed.kernel, machine, subgroups), dtype=torch.uint8)
        self._stride, self._program = codes.stride, Program(machine)
        self._program.add(RowKernel("plain", packed.kernel.decoder.family), x=self._x,
                          x_stride=packed.columns * 4, size=packed.columns, subgroups=subgroups,
                          **codes.written)
        self._program.add(packed.kernel, stripes=packed.stripes, subgroups=subgroups, **codes.read,
                          out=self._out, scratch=scratch, out_stride=padded * 4,
                          scratch_private=scratch.shape[1])
        self._program.finish(tell_compiling)
        self.replace(packed)
        self._take(rows)

    def replace(self, packed: CpuWeight) -> None:
        """Multiply by another weight of the same kernel and shape."""
        self._program.set(1, **{name: None if part is None else part.data_ptr() for name, part in (
            ("weights", packed.weights), ("scales", packed.scales), ("outer", packed.outer),
            ("zeros", packed.zeros))})

    def _take(self, rows: int) -> None:
        """Set the number of rows. A single row is quantized by every thread for itself."""
        if rows == self._rows:
            return
        cut = self._like.units(rows, self._threads)
        private = self._stride if rows == 1 else 0
        self._program.set(0, units=rows, out_private=private)
        self._program.alone(0, rows == 1)
        self._program.set(1, units=cut.units, stripes_a_unit=cut.stripes, rows=rows,
                          rows_a_unit=cut.rows, x_private=private)
        self._rows = rows

    @torch.no_grad()
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x [m, k]``, m at most ``rows`` → float32 ``[m, n]``, valid until the next call."""
        self._take(len(x))
        self._x[:len(x), :self._like.shape[1]] = x
        self.run()
        return self._out[:len(x), :self._like.shape[0]]

    def run(self) -> None:
        pool().run(self._program.records)


def multiply(x: torch.Tensor, packed: CpuWeight) -> torch.Tensor:
    """``x [m, k]`` by a packed weight → ``[m, n]`` in x's dtype, rounded once from float32.

    A row's bits don't depend on the other rows or their number, on the number of threads or on the
    instruction set: :mod:`quantkit_kernels.cpu.matmul` says why.
    """
    if not len(x):
        return x.new_empty(0, packed.shape[0])
    if len(x) > DECODE_ROWS:
        return CpuProduct(packed, len(x))(x).to(x.dtype)
    product = _ready(packed)
    # what comes back is the product's own memory, which its next call writes
    return product(x).to(x.dtype, copy=True)


class _Kept(threading.local):
    """A thread's products, those used last at the end."""

    def __init__(self) -> None:
        self.products: OrderedDict[object, CpuProduct] = OrderedDict()


_kept = _Kept()


def _ready(packed: CpuWeight) -> CpuProduct:
    """A product for up to ``DECODE_ROWS`` rows, kept by shape: a model's layers have few shapes."""
    key = packed.kernel.name, packed.shape, packed.columns, isa().name, pool().threads
    product = _kept.products.pop(key, None)
    if product is None:
        product = CpuProduct(packed, DECODE_ROWS)
        while len(_kept.products) >= KEPT:
            _kept.products.popitem(last=False)
    else:
        product.replace(packed)
    _kept.products[key] = product
    return product


def widened(weight: torch.Tensor, size: int = 0) -> torch.Tensor:
    """A weight in float32 ``[size]`` or, if that is more, ``[n]``, padded with 0."""
    wide = torch.zeros(max(weight.numel(), size))
    wide[:weight.numel()] = weight.float()
    return wide
