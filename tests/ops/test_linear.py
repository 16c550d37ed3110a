"""Plain and quantized multiplies behind one function."""

from __future__ import annotations

import pytest
import torch

from quantkit.ops import reference as module
from quantkit.ops.cpu_weight import CpuWeight
from quantkit.ops.dispatch import DECODE_ROWS
from quantkit.ops.packing import dequantize
from quantkit.ops.reference import dense
from quantkit.ops.stored_weight import PlainWeight, QuantizedWeight
from quantkit.plugins.manager import registry


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("m", [1, 3, 4, 5, 37])
@pytest.mark.parametrize("biased", [True, False])
def test_dense_obeys_the_error_rule(obeys_the_rule, monkeypatch, dtype, m, biased):
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 130)  # several uneven blocks
    random = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(s, generator=random).to(dtype) for s in ((m, 40), (23, 40), (23,)))
    bias = bias if biased else None
    plain = torch.nn.functional.linear(x, weight, bias)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    obeys_the_rule(dense(x, weight, bias), plain, exact)


def test_leading_dimensions_and_bias_survive(make_weight):
    weight, bias = QuantizedWeight(make_weight(16, 64, 4, 32)), torch.arange(16).bfloat16()
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = weight.multiply(x, bias)
    assert y.shape == (2, 3, 16) and y.dtype == torch.bfloat16
    assert torch.equal(y[1, 2], weight.multiply(x[1, 2]) + bias)
    assert torch.equal(dense(x, torch.ones(5, 64)).isfinite(), torch.ones(2, 3, 5, dtype=torch.bool))


def test_a_weight_is_prepared_once_a_kernel_and_follows_the_dtype(make_weight, monkeypatch):
    from quantkit.ops.cpu_linear import CpuInt4

    calls = []
    prepare = CpuInt4.prepare
    monkeypatch.setattr(CpuInt4, "prepare", lambda self, w: calls.append(1) or prepare(self, w))
    weight = QuantizedWeight(make_weight(16, 64, 4, 32))
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16):
        assert weight.multiply(x.to(dtype)).dtype == dtype
    assert len(calls) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 7), (33, 64), (51, 36), (576, 576), (300, 1536)])
@pytest.mark.parametrize("multiply", ["torch", "packed"])
def test_a_row_of_a_plain_product_does_not_depend_on_the_others(multiply, dtype, n, k):
    random = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(s, generator=random).to(dtype) for s in ((40, k), (n, k), (n,)))
    weight = PlainWeight(weight)
    if multiply == "packed":
        weight = weight.packed(dtype)
        assert isinstance(weight, CpuWeight)
    alone = torch.cat([weight.multiply(row, bias) for row in x.split(1)])
    for count in (*range(1, DECODE_ROWS + 1), *((17, 31, 40) if multiply == "packed" else ())):
        first = int(torch.randint(0, 40 - count + 1, (), generator=random))
        got = weight.multiply(x[first:first + count, None], bias)  # [B, 1, in], as decoding has it
        assert torch.equal(got[:, 0], alone[first:first + count]), count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_torch_never_sees_how_many_rows_there_are(monkeypatch, dtype):
    """It may choose another kernel for each shape: so there is one shape."""
    seen = []
    plain = torch.nn.functional.linear
    monkeypatch.setattr(module.F, "linear", lambda x, *rest: seen.append(
        (tuple(x.shape), x.data_ptr() % 64)) or plain(x, *rest))
    for count in range(1, DECODE_ROWS + 1):
        dense(torch.randn(count, 7).to(dtype), torch.randn(5, 7).to(dtype))
    assert set(seen) == {((1, 7), 0)}


def test_what_inference_mode_left_is_used_outside_of_it_too():
    packed, x = PlainWeight(torch.randn(9, 35)).packed(torch.float32), torch.randn(3, 35)
    with torch.inference_mode():
        inside = packed.multiply(x)
    assert torch.equal(packed.multiply(x), inside)
    with torch.inference_mode():
        assert torch.equal(packed.multiply(x), inside)


def test_packed_weights_are_multiplied_by_turns(monkeypatch):
    """One program serves weights of one shape; another shape or number of rows gets its own."""
    from quantkit.ops import cpu_weight

    monkeypatch.setattr(cpu_weight, "KEPT", 2)
    weights = [torch.randn(n, 48, generator=torch.Generator().manual_seed(n)) for n in (40, 41, 42, 40, 41)]
    packed = [PlainWeight(weight).packed(torch.float32) for weight in weights]
    for rows in (1, 3, 1, 16, 2):
        x = torch.randn(rows, 48, generator=torch.Generator().manual_seed(rows))
        found = [weight.multiply(x) for weight in packed]
        for got, weight in zip(found, weights):
            torch.testing.assert_close(got, x @ weight.T)
    assert len(cpu_weight._kept.products) == 2


@pytest.mark.sampled(4)
@pytest.mark.parametrize("keys", [{"bits": 8}, {"bits": 4, "group": 32},
                                  {"bits": 4, "group": 32, "symmetric": False}, {"bits": 3, "group": 32},
                                  {"bits": 8, "symmetric": False},
                                  {"bits": 5, "group": 32, "symmetric": False},
                                  {"bits": 2, "group": 16}, {"bits": 2, "group": 8},
                                  {"bits": 8, "form": "int-quantized", "activations": "token"},
                                  {"bits": 8, "form": "float-quantized", "kind": "fp",
                                   "activations": "token"},
                                  {"bits": 8, "form": "float-quantized", "kind": "fp"},
                                  {"bits": 4, "form": "bnb-nf4", "kind": "nf"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("n", [48, 33])
def test_a_row_of_a_quantized_product_does_not_depend_on_the_others(make_weight, keys, dtype, n):
    """For every kernel that is chosen here."""
    weight = QuantizedWeight(make_weight(n, 192, dtype=torch.bfloat16, **keys))
    x = torch.randn(DECODE_ROWS, 192, generator=torch.Generator().manual_seed(1)).to(dtype)
    alone = torch.cat([weight.multiply(row) for row in x.split(1)])
    for count in (2, 3, 4, 5, 7, 8, 11, DECODE_ROWS):
        assert torch.equal(weight.multiply(x[-count:]), alone[-count:]), count


@pytest.mark.parametrize("bits", [5, 6, 7, 8])
@pytest.mark.parametrize("group", [None, 32, 96])
@pytest.mark.parametrize("m", [1, 20])
def test_zero_points_of_wide_integers(make_weight, bits, group, m):
    """By the CPU's kernel, as near as what activations of 14 bits lose."""
    stored = make_weight(33, 192, bits, group, symmetric=False)
    weight, x = QuantizedWeight(stored), torch.randn(m, 192, generator=torch.Generator().manual_seed(1))
    assert weight.kernel_name(torch.bfloat16, torch.device("cpu"), "decode") == "cpu-int8"
    true = x.bfloat16().double() @ dequantize(registry("formats").get(stored.format), stored).double().T
    product = weight.multiply(x.bfloat16()).double()
    assert (product - true).norm() < 4e-3 * true.norm(), "a bfloat16 result is half of that away"
