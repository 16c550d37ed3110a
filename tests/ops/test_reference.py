"""The reference kernel: every format, dtype and shape, and no dequantized copy kept."""

from __future__ import annotations

import pytest
import torch

from quantkit.ops.linear import linear, query_for
from quantkit.ops.reference import REFERENCE
from quantkit.plugins import registry

WEIGHTS = [{"bits": 8}, {"bits": 4, "group": 32}, {"bits": 4, "group": 32, "symmetric": False},
           {"bits": 3, "group": 32}, {"bits": 2, "group": 16}, {"bits": 8, "symmetric": False},
           {"bits": 4, "form": "bnb-nf4", "kind": "nf"}]


@pytest.mark.parametrize("keys", WEIGHTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("n", "m"), [(1, 1), (7, 3), (33, 17), (96, 130)])
def test_error_rule(make_weight, obeys_the_rule, keys, dtype, n, m):
    weight = make_weight(n, 96, dtype=dtype, **keys)
    x = torch.randn(m, 96, generator=torch.Generator().manual_seed(3)).to(dtype)
    exact = registry("formats").get(weight.format).dequantize(weight)
    assert REFERENCE.declines(query_for(weight, dtype, x.device, "prefill")) is None
    got = REFERENCE.run(x, REFERENCE.prepare(weight))
    obeys_the_rule(got, x @ exact.to(dtype).T, x.double() @ exact.double().T)


def test_nothing_dequantized_is_kept(make_weight):
    weight = make_weight(32, 64, 4, 32, dtype=torch.float32)
    linear(torch.ones(2, 64), weight)
    linear(torch.ones(40, 64), weight)

    def tensors(value):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            for one in value:
                yield from tensors(one)

    assert weight.cache and not list(tensors(tuple(weight.cache.values())))


def test_no_rows(make_weight):
    weight = make_weight(5, 32, 4, 32)
    assert REFERENCE.run(torch.ones(0, 32).bfloat16(), REFERENCE.prepare(weight)).shape == (0, 5)
