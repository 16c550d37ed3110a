"""One product on the CPU with a packed weight: what models that don't run as a program are made of."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict

import torch

from quantkit.ops import cpu_weight
from quantkit.ops.cpu_weight import Activations, CpuWeight
from quantkit.ops.dispatch import DECODE_ROWS
from quantkit.progress import tell_compiling

KEPT = 8
"""Shapes of weights whose products with few rows a thread keeps ready."""


class CpuProduct:
    """A product with a packed weight, ready to be run again and again.

    Args:
        packed: the weight, which whoever calls keeps alive.
        rows: of activations, at most.
    """

    @torch.inference_mode(False)  # else its memory couldn't be written to outside of that mode
    def __init__(self, packed: CpuWeight, rows: int) -> None:
        from quantkit_kernels.cpu.matmul import STRIPE, SUB, scratch_bytes
        from quantkit_kernels.cpu.program import Program
        from quantkit_kernels.cpu.rows import RowKernel

        isa, threads = cpu_weight.isa(), cpu_weight.pool().threads
        subgroups, padded = packed.columns // SUB, packed.stripes * STRIPE
        self._like = dataclasses.replace(packed, weights=torch.empty(0), scales=None, zeros=None)
        self._rows, self._threads = 0, threads
        with torch.inference_mode(False):  # a product made in that mode is used outside of it too
            self._x = torch.zeros(rows, packed.columns)
            self._out = torch.empty(rows, padded)
        codes = Activations(packed, max(rows, threads))
        scratch = torch.empty(threads, scratch_bytes(packed.kernel, isa, subgroups), dtype=torch.uint8)
        self._stride, self._program = codes.stride, Program(isa)
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
            ("weights", packed.weights), ("scales", packed.scales), ("zeros", packed.zeros))})

    def _take(self, rows: int) -> None:
        """So many rows. One is left as the product wants it by every thread for itself."""
        if rows == self._rows:
            return
        units, stripes, each = self._like.units(rows, self._threads)
        private = self._stride if rows == 1 else 0
        self._program.set(0, units=rows, out_private=private)
        self._program.alone(0, rows == 1)
        self._program.set(1, units=units, stripes_a_unit=stripes, rows=rows, rows_a_unit=each,
                          x_private=private)
        self._rows = rows

    @torch.no_grad()
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x [m, k]``, m at most ``rows`` → float32 ``[m, n]``, valid until the next call."""
        self._take(len(x))
        self._x[:len(x), :self._like.shape[1]] = x
        self.run()
        return self._out[:len(x), :self._like.shape[0]]

    def run(self) -> None:
        """The same again."""
        cpu_weight.pool().run(self._program.records)


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
    """For up to ``DECODE_ROWS`` rows; a model's layers have few shapes among them."""
    key = packed.kernel.name, packed.shape, packed.columns, cpu_weight.isa().name, cpu_weight.pool().threads
    found = _kept.products.pop(key, None)
    if found is None:
        found = CpuProduct(packed, DECODE_ROWS)
        while len(_kept.products) >= KEPT:
            _kept.products.popitem(last=False)
    else:
        found.replace(packed)
    _kept.products[key] = found
    return found
