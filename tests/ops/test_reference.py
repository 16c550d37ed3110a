"""The reference kernel: every format, dtype and shape, and no dequantized copy kept."""

from __future__ import annotations

import pytest
import torch

from quantkit.ops.dispatch import query_for
from quantkit.ops.reference import REFERENCE
from quantkit.ops.stored_weight import QuantizedWeight
from quantkit.plugins.manager import registry

WEIGHTS = [{"bits": 8}, {"bits": 4, "group": 32}, {"bits": 4, "group": 32, "symmetric": False},
           {"bits": 3, "group": 32}, {"bits": 2, "group": 8}, {"bits": 8, "symmetric": False},
           {"bits": 4, "form": "bnb-nf4", "kind": "nf"}, {"bits": 8, "form": "float-quantized", "kind": "fp"}]
TOKENS = [{"bits": 8, "form": "int-quantized", "activations": "token"},
          {"bits": 8, "form": "float-quantized", "kind": "fp", "activations": "token"}]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("keys", WEIGHTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("n", "m"), [(1, 1), (7, 3), (33, 17), (96, 130)])
def test_error_rule(make_weight, obeys_the_rule, keys, dtype, n, m):
    weight = make_weight(n, 96, dtype=dtype, **keys)
    x = torch.randn(m, 96, generator=torch.Generator().manual_seed(3)).to(dtype)
    exact = registry("formats").get(weight.format).dequantize(weight)
    assert REFERENCE.reason_against(query_for(weight, dtype, x.device, "prefill")) is None
    got = REFERENCE.run(x, REFERENCE.prepare(weight))
    obeys_the_rule(got, x @ exact.to(dtype).T, x.double() @ exact.double().T,
                   x.double().abs() @ exact.double().abs().T)


def rounded_by_hand(x, kind):
    """Every token on its grid, in float64 from float32 quotients, as vLLM rounds."""
    scale = x.float().abs().amax(1, keepdim=True) / {"int": 127, "fp": 448}[kind]
    quotient = x.float() / scale
    level = quotient.to(torch.float8_e4m3fn).double() if kind == "fp" else quotient.round().double()
    return level * scale.double()


@pytest.mark.parametrize("keys", TOKENS, ids=lambda keys: keys["form"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("n", "m"), [(1, 1), (7, 3), (33, 17), (96, 130)])
def test_tokens_are_rounded(make_weight, obeys_the_rule, keys, dtype, n, m):
    """Beside float64 of the same rounded activations; and that much apart from unrounded ones."""
    weight = make_weight(n, 96, dtype=dtype, **keys)
    x = torch.randn(m, 96, generator=torch.Generator().manual_seed(3))
    x[0, 5] = 60.0
    x = x.to(dtype)
    exact = registry("formats").get(weight.format).dequantize(weight).double()
    got = REFERENCE.run(x, REFERENCE.prepare(weight))
    rounded = rounded_by_hand(x, weight.spec.kind)
    obeys_the_rule(got, x @ exact.to(dtype).T, rounded @ exact.T, rounded.abs() @ exact.abs().T)
    lost = (x.double() @ exact.T - rounded @ exact.T).norm()
    assert (got.double() - x.double() @ exact.T).norm() > 0.5 * lost > 0


@pytest.mark.parametrize("keys", TOKENS, ids=lambda keys: keys["form"])
def test_what_is_no_number_shows(make_weight, keys):
    weight = make_weight(5, 32, dtype=torch.float32, **keys)
    x = torch.ones(3, 32)
    x[1, 7], x[2] = float("inf"), 0
    got = REFERENCE.run(x, REFERENCE.prepare(weight))
    assert torch.isnan(got[1]).all() and torch.isfinite(got[0]).all() and torch.equal(got[2], torch.zeros(5))
    assert REFERENCE.run(x[:0], REFERENCE.prepare(weight)).shape == (0, 5)


def test_nothing_dequantized_is_kept(make_weight):
    weight = QuantizedWeight(make_weight(32, 64, 4, 32, dtype=torch.float32))
    weight.multiply(torch.ones(2, 64))
    weight.multiply(torch.ones(40, 64))

    def tensors(value):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            for item in value:
                yield from tensors(item)

    prepared = (*weight._prepared.values(), *weight.quantized.cache.values())
    assert prepared and not list(tensors(prepared))


def test_no_rows(make_weight):
    weight = make_weight(5, 32, 4, 32)
    assert REFERENCE.run(torch.ones(0, 32).bfloat16(), REFERENCE.prepare(weight)).shape == (0, 5)
