"""torch's integer kernels: right where they accept, and never asked where they would be wrong."""

from __future__ import annotations

import pytest
import torch

from quantkit.ops.aten import INT4, INT8
from quantkit.ops.dispatch import choose
from quantkit.ops.linear import linear, query_for
from quantkit.plugins import registry

ROWS = (1, 2, 3, 5, 16)


def activations(m, k, seed=1, shift=0.0):
    return (torch.randn(m, k, generator=torch.Generator().manual_seed(seed)) + shift).bfloat16()


def run(kernel, x, weight):
    assert kernel.declines(query_for(weight, x.dtype, x.device, "decode")) is None
    return kernel.run(x, kernel.prepare(weight))


def same_precision(x, weight):
    """The computation as torch does it in bfloat16, and exactly."""
    exact = registry("formats").get(weight.format).dequantize(weight)
    return x @ exact.bfloat16().T, x.double() @ exact.double().T


@pytest.mark.parametrize("shape", [(16, 16), (1, 16), (3, 48), (17, 32), (33, 112), (101, 64), (192, 576)])
@pytest.mark.parametrize("m", ROWS)
def test_int8(make_weight, obeys_the_rule, shape, m):
    weight, x = make_weight(*shape, 8), activations(m, shape[1])
    obeys_the_rule(run(INT8, x, weight), *same_precision(x, weight))


@pytest.mark.parametrize(("shape", "group"), [
    ((16, 32), 32), ((32, 96), 32), ((48, 160), 32), ((16, 64), 64), ((80, 192), 64), ((112, 64), 64),
    ((64, 384), 128), ((32, 768), 256), ((192, 576), 64)])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("m", ROWS)
def test_int4(make_weight, obeys_the_rule, shape, group, symmetric, m):
    weight, x = make_weight(*shape, 4, group, symmetric=symmetric), activations(m, shape[1])
    obeys_the_rule(run(INT4, x, weight), *same_precision(x, weight))


def test_int8_takes_one_scale_for_all(make_weight):
    from quantkit.formats.base import Codes
    from quantkit.spec import Granularity, QuantSpec

    spec = QuantSpec(bits=8, granularity=Granularity(strategy="tensor"), scale_dtype="bfloat16")
    codes = torch.arange(256, dtype=torch.uint8).reshape(8, 32)
    weight = registry("formats").get("pack-quantized").pack(Codes(spec, codes, torch.full((1, 1), 0.25)),
                                                            torch.bfloat16)
    x = torch.eye(32, dtype=torch.bfloat16)[:4]
    expected = ((codes.double() - 128) * 0.25).T[:4]
    assert torch.equal(run(INT8, x, weight).double(), expected)


@pytest.mark.parametrize(("kernel", "weight", "query", "reason"), [
    (INT8, (16, 33, 8), {}, "divisible by 16"), (INT8, (16, 40, 8), {}, "divisible by 16"),
    (INT8, (16, 32, 4), {}, "8-bit"), (INT8, (16, 32, 8, 16), {}, "one scale a row"),
    (INT8, (16, 32, 8), {"phase": "prefill"}, "many rows"),
    (INT8, (16, 32, 8), {"dtype": torch.float32}, "bfloat16 activations"),
    (INT8, (16, 32, 8), {"device": torch.device("meta")}, "cpu"),
    (INT4, (17, 64, 4, 64), {}, "divisible by 16"), (INT4, (24, 64, 4, 64), {}, "divisible by 16"),
    (INT4, (16, 64, 4, 16), {}, "groups of 32"), (INT4, (16, 64, 4), {}, "groups of 32"),
    (INT4, (16, 64, 8), {}, "4-bit"), (INT4, (16, 64, 4, 64), {"dtype": torch.float16}, "bfloat16"),
    (INT4, (16, 64, 4, 64), {"phase": "prefill"}, "many rows"),
])
def test_declines_with_the_reason(make_weight, kernel, weight, query, reason):
    asked = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "phase": "decode"} | query
    assert reason in kernel.declines(query_for(make_weight(*weight), **asked))


def test_asymmetric_int8_and_codebooks_and_wide_scales_are_declined(make_weight):
    def ask(kernel, weight):
        return kernel.declines(query_for(weight, torch.bfloat16, torch.device("cpu"), "decode"))

    assert "no zero point" in ask(INT8, make_weight(16, 32, 8, symmetric=False))
    assert "not nf" in ask(INT4, make_weight(16, 64, 4, form="bnb-nf4", kind="nf"))
    assert "scales" in ask(INT4, make_weight(16, 64, 4, 32, dtype=torch.float32))


def test_no_rows(make_weight):
    assert run(INT8, activations(0, 32), make_weight(5, 32, 8)).shape == (0, 5)
    assert run(INT4, activations(0, 64), make_weight(16, 64, 4, 32)).shape == (0, 16)


def test_rows_that_are_not_contiguous(make_weight):
    for kernel, weight in ((INT8, make_weight(16, 64, 8)), (INT4, make_weight(16, 64, 4, 32))):
        x = activations(64, 3).T
        assert torch.equal(run(kernel, x, weight), run(kernel, x.contiguous(), weight))


def test_dispatch_prefers_them_for_decode_only(make_weight):
    weight = make_weight(16, 64, 4, 32)

    def chosen(phase):
        return choose(query_for(weight, torch.bfloat16, torch.device("cpu"), phase))

    assert chosen("decode").kernel is INT4
    assert chosen("prefill").kernel.name == "reference"
    assert {name for name, _ in chosen("prefill").declined} == {
        "aten-int4", "aten-int8", "triton-nf4", "triton-w4a16", "triton-w8a16"}
    assert linear(activations(1, 64), weight).shape == (1, 16)
    assert torch.equal(linear(activations(1, 64), weight), run(INT4, activations(1, 64), weight))
