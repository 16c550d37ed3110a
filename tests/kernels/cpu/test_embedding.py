"""Rows of an embedding."""

from __future__ import annotations

import pytest
import torch

from quantkit_kernels.cpu import pack, reference
from quantkit_kernels.cpu.embedding import Embed
from quantkit_kernels.cpu.program import Program

VOCABULARY = 70
TOKENS = [0, VOCABULARY - 1, 31, 32, 33, 5, 5, 7]


@pytest.fixture
def look_up(pools, room):
    """``look_up(isa, ids, table, padded, packed)`` → float32 ``[m, padded]``."""
    def run(isa, ids, table, padded, packed, threads=2, scale=1.0):
        out = room(len(ids), padded)
        program = Program(isa)
        program.add(Embed(isa.lanes if packed else 0, scale), len(ids), ids=ids, out=out, padded=padded,
                    table=pack.bf16(table, isa.lanes) if packed else table, out_stride=padded * 4,
                    size=padded if packed else table.shape[1])
        program.finish()
        pools[threads].run(program.records)
        return out

    return run


def every_bit(n):
    """A table in which all bits occur: NaN, infinities and subnormal numbers too."""
    random = torch.Generator().manual_seed(0)
    drawn = torch.randint(-2**15, 2**15, (VOCABULARY, n), generator=random, dtype=torch.int16)
    return drawn.view(torch.bfloat16)


@pytest.mark.parametrize("packed", [False, True], ids=["table", "blocks"])
@pytest.mark.parametrize("size", [1, 31, 32, 33, 96, 576])
def test_the_bits_of_the_reference(isa, look_up, size, packed):
    ids, table = torch.tensor(TOKENS), every_bit(size)
    padded = -(-size // 32) * 32
    found = look_up(isa, ids, table, padded, packed)
    expected = reference.embedding(ids.numpy(), table.view(torch.int16).numpy())
    assert (found[:, :size].numpy().view("i4") == expected.view("i4")).all()
    assert (found[:, size:].numpy().view("i4") == 0).all()


@pytest.mark.parametrize("packed", [False, True], ids=["table", "blocks"])
def test_rows_times_a_number(isa, look_up, packed):
    ids, table = torch.tensor(TOKENS), torch.randn(VOCABULARY, 64).bfloat16()
    found = look_up(isa, ids, table, 64, packed, scale=33.75)
    assert torch.equal(found, table[ids].float() * 33.75)


def test_the_reference_widens_as_torch_does():
    ids, table = torch.tensor(TOKENS), torch.randn(VOCABULARY, 33).bfloat16()
    found = reference.embedding(ids.numpy(), table.view(torch.int16).numpy())
    assert torch.equal(torch.from_numpy(found), table[ids].float())
