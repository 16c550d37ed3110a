"""Ceilings are medians of what was measured, and the kernels do what they are timed for."""

from __future__ import annotations

from statistics import median

import pytest
import torch

from quantkit_kernels.cpu import ceilings
from quantkit_kernels.cpu.ceilings import CHAINS, PLACES, CpuCeilings, ProductKernel
from quantkit_kernels.cpu.isa import PLAIN
from quantkit_kernels.cpu.program import Program


@pytest.fixture
def measured(isa, pools, monkeypatch):
    monkeypatch.setattr(ceilings, "SIZE", 1 << 22)
    monkeypatch.setattr(ceilings, "STEPS", 64)
    return CpuCeilings(pools[2], isa)


def test_a_ceiling_is_the_median_of_all_that_was_measured(measured):
    reads = [measured.read() for _ in range(7)]
    assert measured.bandwidth() == median(reads) > 0
    rates = [measured.multiply("float32") for _ in range(7)]
    assert measured.products("float32") == median(rates) > 0


def test_every_kind_of_product_has_one(measured):
    assert all(measured.products(operands) > 0 for operands in ("bf16", "float32", "int16", "int8"))


def test_bf16_has_the_ceiling_of_float32_where_there_is_no_instruction(measured, monkeypatch):
    monkeypatch.setattr(measured, "_isa", PLAIN)
    rates = [measured.multiply(operands) for operands in ("bf16", "float32", "bf16", "float32", "float32")]
    assert measured.products("bf16") == measured.products("float32") == median(rates)


def test_what_was_not_read_is_an_error(measured):
    measured._reader.set(0, units=1, data=torch.zeros(1 << 18, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="sums"):
        measured.read()


@pytest.mark.parametrize("operands", ["bf16", "float32", "int16", "int8"])
def test_every_step_multiplies_by_every_vector(isa, operands, pools):
    """Whole small numbers, so that every sum is exact: none of the products is left out."""
    if operands == "bf16" and not isa.bf16:
        pytest.skip("this CPU has no bf16")
    dtype = torch.bfloat16 if operands == "bf16" else getattr(torch, operands)
    each = {1: 4, 2: 2, 4: 1}[dtype.itemsize]
    data = torch.randint(0, 3, (CHAINS, isa.lanes, each), generator=torch.Generator().manual_seed(0))
    out = torch.zeros(isa.lanes, dtype=torch.float32 if dtype.is_floating_point else torch.int32)
    total = torch.zeros(16, dtype=out.dtype)
    program = Program(isa)
    program.add(ProductKernel(operands), data=data.to(dtype).contiguous(), sums=total, steps=2 * PLACES)
    program.finish()
    pools[1].run(program.records)
    if isa.amx and operands == "bf16":  # tiles whose rows are all a vector of the data
        left, right = (data[first:first + 2].sum(0) for first in (0, 2))
        expected = 2 * PLACES * (left.sum(0) * right).sum(-1)
    else:
        expected = 2 * (data[:PLACES].sum(0) * data.sum(0)).sum(-1)
    if operands == "int8" and isa.sums_int16:
        words = total.view(torch.int16).view(-1)[:2 * isa.lanes].view(isa.lanes, 2).sum(-1)
        assert torch.equal(words.long(), expected)
    else:
        assert torch.equal(total[:isa.lanes].long(), expected)
