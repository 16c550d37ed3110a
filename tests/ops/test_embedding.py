"""Rows of a quantized embedding: what the whole table dequantizes to, by its format and by CPU kernels."""

from __future__ import annotations

import pytest
import torch

from quantkit.formats.base import Codes
from quantkit.ops.cpu_linear import CpuKernel
from quantkit.ops.cpu_weight import pack_plain
from quantkit.ops.dispatch import choose, query_for
from quantkit.ops.linear_weight import embed
from quantkit.ops.stored_weight import PlainWeight, QuantizedWeight
from quantkit.plugins.manager import registry
from tests.helpers.quantized import quant_spec

IDS = torch.tensor([[0, 69, 31], [32, 5, 5]])
ROWS, COLUMNS = 70, 128


SPECS = [*(("pack-quantized", quant_spec("int", bits, *granularity, symmetric=symmetric))
           for bits in (2, 3, 4, 5, 6, 7, 8) for granularity in (("channel",), ("group", 32))
           for symmetric in (True, False)),
         ("pack-quantized", quant_spec("int", 8, "tensor")),
         ("int-quantized", quant_spec("int", 8, "channel", activations="token")),
         ("float-quantized", quant_spec("fp", 8, "channel")),
         ("float-quantized", quant_spec("fp", 8, "tensor")),
         *(("bnb-nf4", quant_spec("nf", 4, "block", size, nested=nested))
           for size in (64, 256) for nested in (False, True))]


@pytest.fixture(params=SPECS, ids=lambda one: f"{one[0]} {one[1].label()}".replace(" ", "-"))
def table(request):
    name, spec = request.param
    random = torch.Generator().manual_seed(1)
    shape = spec.scale_shape((ROWS, COLUMNS))
    codes = torch.randint(0, 2**spec.bits, (ROWS, COLUMNS), generator=random, dtype=torch.uint8)
    if spec.kind == "fp":
        codes[codes & 0x7F == 0x7F] = 0
    scale = (0.5 + torch.rand(shape, generator=random)).bfloat16().float()
    zero = None if spec.symmetric else torch.randint(0, 2**spec.bits, shape, generator=random,
                                                     dtype=torch.uint8)
    return registry("formats").get(name).pack(Codes(spec, codes, scale, zero), torch.bfloat16)


def test_its_format_gives_single_rows(table):
    form = registry("formats").get(table.format)
    whole = form.dequantize(table)
    assert torch.equal(form.rows(table, IDS.flatten()), whole[IDS.flatten()])
    assert torch.equal(form.rows(table, torch.arange(ROWS)), whole)
    stored = QuantizedWeight(table)
    found = embed(IDS, stored, torch.float32)
    assert found.shape == (2, 3, COLUMNS) and torch.equal(found, whole[IDS])
    assert torch.equal(embed(IDS, stored, torch.bfloat16), whole[IDS].bfloat16())
    assert embed(IDS[:0], stored, torch.float32).shape == (0, 3, COLUMNS)


def test_a_kernel_gives_the_same(table):
    kernel = choose(query_for(table, torch.bfloat16, torch.device("cpu"), "decode")).kernel
    across_rows = table.spec.granularity.size == 256
    assert isinstance(kernel, CpuKernel) == (not across_rows), "only these have none"
    if not isinstance(kernel, CpuKernel):
        return
    packed = kernel.prepare(table)
    whole = registry("formats").get(table.format).dequantize(table)
    found = embed(IDS, packed, torch.float32)
    if table.spec.kind == "nf":  # the kernels' table is rounded to whole multiples of 1/8191
        torch.testing.assert_close(found, whole[IDS], rtol=0, atol=float(whole.abs().max()) / 8191)
    else:
        assert torch.equal(found, whole[IDS])
    assert embed(IDS[:0], packed, torch.float32).shape == (0, 3, COLUMNS)
    for token in (-1, ROWS):
        with pytest.raises(IndexError, match="token id"):
            embed(torch.tensor([3, token]), packed, torch.float32)


def test_a_plain_table_and_its_blocks():
    plain = torch.randn(ROWS, COLUMNS).bfloat16()
    for weight in (PlainWeight(plain), pack_plain(plain)):
        found = embed(IDS, weight, torch.bfloat16)
        assert found.dtype == torch.bfloat16 and torch.equal(found, plain[IDS])
