"""The largest of a vector, and whether all of it is finite."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from llvmlite import ir

from quantkit_kernels.cpu.compiled import address
from quantkit_kernels.cpu.emit import Emitter
from quantkit_kernels.cpu.isa import Isa
from quantkit_kernels.cpu.values import F32, I32, I64, PTR, vec

LANES = 16
LARGEST = 3.4028234663852886e38


def emit(module: ir.Module) -> None:
    """``i64 argmax(float32 *, i64 n)``: the lowest index of the largest, −1 if not all are finite."""
    e = Emitter(module, "argmax", [PTR, I64], I64)
    values, count = e.arguments
    wide = vec(F32, LANES)
    full = count & -LANES
    highest, odd = e.var(e.const(wide, float("-inf"))), e.var(e.const(vec(I32, LANES), 0))

    with e.loop(0, full, LANES) as i:
        value = e.load(values, wide, i * 4)
        # NaN is below nothing, so the comparison is false for it too
        odd.set(odd.get() | (e.abs(value) <= LARGEST).zext(vec(I32, LANES)) ^ 1)
        highest.set(e.max(value, highest.get()))
    top, wrong = e.var(e.highest(highest.get())), e.var(e.const(I32, 0))
    for lane in range(LANES):
        wrong.set(wrong.get() | odd.get().lane(lane))
    with e.loop(full, count) as i:
        value = e.load(values, F32, i * 4)
        wrong.set(wrong.get() | (e.abs(value) <= LARGEST).zext(I32) ^ 1)
        top.set(e.max(value, top.get()))
    index = e.var(e.const(I64, -1))
    with e.when(wrong.get().equals(0)):
        index.set(0)
        # a second look stops where the first found it: near there, then at it
        with e.forever() as leave:
            near = index.get() + LANES
            leave(near > count)
            leave(e.highest(e.load(values, wide, index.get() * 4)).equals(top.get()))
            index.set(near)
        with e.forever() as leave:
            leave(e.load(values, F32, index.get() * 4).equals(top.get()))
            index.set(index.get() + 1)
    e.ret(index.get())


@functools.cache
def _function(isa: Isa) -> Callable[[int, int], int]:
    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)(address("argmax", isa, emit))


def argmax(values: torch.Tensor, isa: Isa) -> int | None:
    """The lowest index of the largest of float32 ``[n]``, n > 0; ``None`` if one is NaN or infinite."""
    values = values.contiguous()
    if not values.numel():
        raise ValueError("nothing has no largest number")
    index = _function(isa)(values.data_ptr(), values.numel())
    return None if index < 0 else index
