"""Runs kernels of one instruction set alone, on buffers that show whoever writes beyond their ends."""

from __future__ import annotations

import dataclasses
import math
import struct

import numpy as np
import pytest
import torch

from quantkit_kernels.cpu import decoders, tiles
from quantkit_kernels.cpu import isa as isas
from quantkit_kernels.cpu.matmul import Matmul, scratch_bytes
from quantkit_kernels.cpu.pool import Pool
from quantkit_kernels.cpu.program import Program
from quantkit_kernels.cpu.rows import RowKernel
from quantkit_kernels.cpu.weight_decoder import STRIPE, SUB

GUARD, BYTE = 256, 0xA5
WIDE = isas.Isa("plain", 16)
"""The plain kernels in the layout of wide vectors, which this machine may not have."""


def reason_against(isa):
    """Why this machine can't run an instruction set; ``None`` if it can. Asks for the use of AMX's tiles."""
    if lacking := isas.missing(isa, isas.host_features()):
        return f"this CPU lacks {', '.join(lacking)}"
    return "the system doesn't permit AMX's tiles" if isa.amx and not tiles.permitted() else None


@pytest.fixture(params=[*isas.ALL, WIDE], ids=lambda isa: f"{isa.name}-{isa.lanes}")
def isa(request):
    """Every instruction set that this machine has."""
    if reason := reason_against(request.param):
        pytest.skip(reason)
    return request.param


@pytest.fixture
def fastest():
    """The best instruction set of this machine."""
    return next(isa for isa in isas.ALL if reason_against(isa) is None)


@pytest.fixture(scope="session")
def pools():
    """By number of threads."""
    made = {count: Pool(count) for count in (1, 2)}
    yield made
    for pool in made.values():
        pool.close()


class Guarded:
    """Tensors of NaN with marks on both sides."""

    def __init__(self):
        self._made = []

    def __call__(self, *shape, dtype=torch.float32):
        size = math.prod(shape) * dtype.itemsize
        whole = torch.full((size + 2 * GUARD,), BYTE, dtype=torch.uint8)
        inner = whole[GUARD:GUARD + size]
        if dtype.is_floating_point:
            inner.view(dtype).fill_(math.nan)
        self._made.append((whole, size))
        return inner.view(dtype).view(shape)

    def check(self):
        for whole, size in self._made:
            assert (whole[:GUARD] == BYTE).all() and (whole[GUARD + size:] == BYTE).all()


@pytest.fixture
def room():
    """``room(*shape, dtype=…)``; writing beside such a tensor fails the test."""
    guarded = Guarded()
    yield guarded
    guarded.check()


def bits(x):
    """A float's bits as an int."""
    return struct.unpack("<i", struct.pack("<f", x))[0]


@pytest.fixture
def leave(pools, room):
    """``leave(isa, rows, x, …)`` → codes int ``[m, k]`` (or float32), scales, sums of subgroups, then of
    their halves."""
    def run(isa, rows: RowKernel, x, threads=1, **values):
        m, k = x.shape
        subgroups, width = k // SUB, rows.family.width
        kind = {1: torch.int8, 2: torch.int16, 4: torch.float32}[width]
        codes = room(m, k, dtype=kind)
        scales, sums = room(m, subgroups), room(m, 3 * subgroups, dtype=torch.int32)
        # one stride serves all three, so rows are run one by one
        for row in range(m):
            program = Program(isa)
            own = {name: value[row:row + 1] for name, value in values.items()
                   if isinstance(value, torch.Tensor) and value.dim() == 2}
            program.add(rows, 1, x=x[row:row + 1], out=codes[row], scales=scales[row], sums=sums[row],
                        x_stride=k * 4, size=values.get("size", k), subgroups=subgroups,
                        **{**{n: v for n, v in values.items() if n != "size"}, **own})
            program.finish()
            pools[threads].run(program.records)
        return codes, scales, sums

    return run


@pytest.fixture
def multiply(pools, room):
    """``multiply(isa, matmul, x, weights, scales, zeros, n)`` → float32 ``[m, n]``."""
    def run(isa, matmul: Matmul, x, weights, scales=None, zeros=None, n=1, *, outer=None, threads=1,
            stripes_a_unit=1, rows_a_unit=None, bias=None, add=None):
        m, k = x.shape
        if matmul.decoder is decoders.BF16:
            matmul = dataclasses.replace(matmul, decoder=decoders.bf16(isa))
        family, together = matmul.decoder.family, max(1, matmul.decoder.rows // STRIPE)
        subgroups, stripes = k // SUB, -(-n // (STRIPE * together)) * together
        stripes_a_unit *= together
        stride = -(-(k * family.width + 16 * subgroups) // 64) * 64
        codes = room(m * stride, dtype=torch.uint8)
        places = [codes[at:] for at in (0, k * family.width, k * family.width + 4 * subgroups)]
        out = room(m, stripes * STRIPE)
        if add is not None:
            out[:, :n], out[:, n:] = add, 0
        scratch = room(threads, -(-scratch_bytes(matmul, isa, subgroups) // 64) * 64, dtype=torch.uint8)
        each = rows_a_unit or max(m, 1)
        program = Program(isa)
        program.add(RowKernel("plain", family), m, x=x, x_stride=k * 4, size=k, subgroups=subgroups,
                    out_stride=stride, **dict(zip(("out", "scales", "sums"), places)))
        program.add(matmul, -(-stripes // stripes_a_unit) * -(-m // each), weights=weights, scales=scales,
                    outer=outer, zeros=zeros, **dict(zip(("x", "x_scales", "x_sums"), places)), out=out,
                    scratch=scratch,
                    x_stride=stride, out_stride=stripes * STRIPE * 4, stripes=stripes, subgroups=subgroups,
                    stripes_a_unit=stripes_a_unit, rows=m, rows_a_unit=each, bias=bias,
                    add=int(add is not None), scratch_private=scratch.shape[1])
        program.finish()
        pools[threads].run(program.records)
        return out[:, :n].clone()

    return run


@pytest.fixture
def same():
    """``same(a, b)``: equal bits, but a zero's sign doesn't count."""
    def check(a, b):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))

    return check
