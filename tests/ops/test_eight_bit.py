"""The CPU's kernels for W8A8 and fp8 beside the reference, which rounds alike; who runs what."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from quantkit.formats.spec import Granularity
from quantkit.ops.cpu_linear import FP, INT, INT8
from quantkit.ops.dispatch import choose, query_for
from quantkit.ops.reference import REFERENCE

CASES = {"w8a8": ({"form": "int-quantized", "activations": "token"}, INT),
         "fp8 a8": ({"form": "float-quantized", "kind": "fp", "activations": "token"}, FP),
         "fp8": ({"form": "float-quantized", "kind": "fp"}, FP)}


@pytest.fixture(params=CASES, ids=str)
def case(request, make_weight):
    """``case(n, k)`` → a weight and the kernel that multiplies it."""
    keys, kernel = CASES[request.param]
    return lambda n, k, **more: (make_weight(n, k, 8, **keys | more), kernel)


def asked(weight, **changes):
    return dataclasses.replace(query_for(weight, torch.bfloat16, torch.device("cpu"), "decode"), **changes)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("m", [1, 3, 17, 70])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 97), (96, 576), (64, 1536)])
def test_near_the_reference(case, n, k, m):
    """Both round the same float32 numbers, so only the last rounding of sums may differ."""
    weight, kernel = case(n, k)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(1))
    x[:, k // 3] *= 30
    found = kernel.run(x, kernel.prepare(weight))
    expected = REFERENCE.run(x, REFERENCE.prepare(weight))
    assert found.shape == (m, n)
    assert torch.allclose(found, expected, rtol=2e-6, atol=2e-6 * expected.abs().max())


def test_int8_sums_are_exact(make_weight):
    """Up to 2²⁴ float32 adds whole numbers exactly: kernel and reference give the same bits."""
    weight = make_weight(40, 512, 8, form="int-quantized", activations="token")
    x = torch.randn(9, 512, generator=torch.Generator().manual_seed(1))
    assert torch.equal(INT.run(x, INT.prepare(weight)), REFERENCE.run(x, REFERENCE.prepare(weight)))


def test_one_scale_a_tensor(make_weight):
    weight = make_weight(40, 64, 8, form="int-quantized", activations="token")
    one = weight.tensors["weight_scale"][:1, 0]
    tensor = weight.spec.model_copy(update={"granularity": Granularity(strategy="tensor")})
    whole = dataclasses.replace(weight, cache={}, spec=tensor, tensors={
        **weight.tensors, "weight_scale": one})
    rows = dataclasses.replace(weight, cache={}, tensors={
        **weight.tensors, "weight_scale": one.expand(40, 1).contiguous()})
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(INT.run(x, INT.prepare(whole)), INT.run(x, INT.prepare(rows)))


def test_each_is_chosen_for_its_own_and_says_why_not_for_others(case, make_weight):
    weight, kernel = case(32, 64)
    assert choose(asked(weight)).kernel is kernel
    assert choose(asked(weight, dtype=torch.float32)).kernel is REFERENCE
    plain = make_weight(32, 64, 8)
    assert kernel.reason_against(asked(plain)) is not None and choose(asked(plain)).kernel is INT8
    query = asked(make_weight(32, 64, 8, **CASES["w8a8"][0]), k=1000000)
    assert "1000000 " in f"{INT.reason_against(query)} "


def test_a_kernel_that_leaves_activations_as_they_are_declines(make_weight):
    from quantkit.ops.triton_linear import W8

    weight = make_weight(32, 64, 8, form="int-quantized", activations="token")
    assert "leaves activations as they are" in str(INT8.reason_against(asked(weight)))
    assert W8.reason_against(asked(weight, device="cuda")) is not None
