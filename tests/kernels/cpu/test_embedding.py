"""Rows of an embedding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantkit_kernels.cpu import decoders, pack
from quantkit_kernels.cpu.embedding import Embed
from quantkit_kernels.cpu.matmul import Matmul
from quantkit_kernels.cpu.program import Program
from tests.kernels.cpu import reference

VOCABULARY = 70
TOKENS = [0, VOCABULARY - 1, 31, 32, 33, 5, 5, 7]
PLAIN = {"bf16": (torch.bfloat16, decoders.BF16), "f16": (torch.float16, decoders.FP16),
         "f32": (torch.float32, decoders.FP32)}


@pytest.fixture
def look_up(pools, room):
    """``look_up(isa, ids, kernel, size, padded, table, …)`` → float32 ``[m, padded]``."""
    def run(isa, ids, kernel, size, padded, table, threads=2, scale=1.0, plain="bf16", **parts):
        out = room(len(ids), padded)
        program = Program(isa)
        program.add(Embed(kernel, scale, plain), len(ids), ids=ids, out=out, padded=padded, table=table,
                    out_stride=padded * 4, size=size, **parts)
        program.finish()
        pools[threads].run(program.records)
        return out

    return run


def every_bit(n, dtype):
    """A table in which all bits occur: NaN, infinities and subnormal numbers too."""
    random = torch.Generator().manual_seed(0)
    whole = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    ends = torch.iinfo(whole)
    return torch.randint(ends.min, ends.max, (VOCABULARY, n), generator=random, dtype=whole).view(dtype)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("packed", [False, True], ids=["table", "rows"])
@pytest.mark.parametrize("size", [1, 31, 32, 33, 96, 576])
def test_the_bits_of_the_reference(isa, look_up, size, packed, kind):
    dtype, decoder = PLAIN[kind]
    ids, table = torch.tensor(TOKENS), every_bit(size, dtype)
    padded = -(-size // 32) * 32
    laid = pack.rows(table) if packed else table
    found = look_up(isa, ids, Matmul(decoder, None) if packed else None, size, padded + 16, laid, plain=kind,
                    columns=padded)[:, :size].contiguous().numpy()
    bits = table.view(torch.int16) if kind == "bf16" else table
    expected = reference.embedding(ids.numpy(), bits.numpy())
    real = ~np.isnan(expected)
    assert (np.isnan(found) == ~real).all() and (found.view("i4") == expected.view("i4"))[real].all()


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("packed", [False, True], ids=["table", "rows"])
def test_rows_times_a_number(isa, look_up, packed, kind):
    dtype, decoder = PLAIN[kind]
    ids, table = torch.tensor(TOKENS), torch.randn(VOCABULARY, 64).to(dtype)
    laid = pack.rows(table) if packed else table
    found = look_up(isa, ids, Matmul(decoder, None) if packed else None, 64, 64, laid, scale=33.75,
                    plain=kind, columns=64)
    assert torch.equal(found, table[ids].float() * 33.75)


def test_what_lies_in_several_blocks_is_not_looked_up(fastest):
    kernel = Matmul(decoders.trellis(4, 12, (1, 2, 3)), 0)
    program = Program(fastest)
    program.add(Embed(kernel))
    with pytest.raises(AssertionError, match="several blocks"):
        program.finish()
