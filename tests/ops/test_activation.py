from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from quantkit.ops.rows import clamped_silu_mul, gelu_tanh_mul, silu_mul, softcapped


def test_formula_and_untouched_arguments(obeys_the_rule):
    random = torch.Generator().manual_seed(0)
    gate, up = (3 * torch.randn(4, 33, generator=random) for _ in range(2))
    before = gate.clone(), up.clone()
    exact = gate.double() * torch.sigmoid(gate.double()) * up.double()
    obeys_the_rule(silu_mul(gate, up), gate * torch.sigmoid(gate) * up, exact)
    assert torch.equal(gate, before[0]) and torch.equal(up, before[1])


def test_gelu_by_tanh(obeys_the_rule):
    random = torch.Generator().manual_seed(0)
    gate, up = (3 * torch.randn(4, 33, generator=random) for _ in range(2))
    before = gate.clone(), up.clone()

    def formula(x, y):
        return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))) * y

    obeys_the_rule(gelu_tanh_mul(gate, up), formula(gate, up), formula(gate.double(), up.double()))
    assert torch.equal(gate, before[0]) and torch.equal(up, before[1])


@pytest.mark.parametrize("limit", [7.0, 0.5])
def test_clamped_silu_clamps_both_and_adds_one(obeys_the_rule, limit):
    random = torch.Generator().manual_seed(0)
    gate, up = (6 * torch.randn(4, 33, generator=random) for _ in range(2))
    before = gate.clone(), up.clone()

    def formula(x, y):
        x, y = x.clamp(max=limit), y.clamp(-limit, limit)
        return x * torch.sigmoid(1.702 * x) * (y + 1)

    obeys_the_rule(clamped_silu_mul(gate, up, limit), formula(gate, up), formula(gate.double(), up.double()))
    assert torch.equal(gate, before[0]) and torch.equal(up, before[1])


def test_a_cap_is_never_passed_and_small_numbers_stay():
    x = torch.tensor([-1e4, -0.01, 0.0, 0.01, 5.0, 1e4])
    capped = softcapped(x, 5.0)
    assert capped.abs().max() <= 5 and torch.allclose(capped[1:4], x[1:4], atol=1e-7)
    assert float(capped[4]) == pytest.approx(5 * math.tanh(1))
    assert softcapped(x, None) is x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("function", [silu_mul, gelu_tanh_mul, partial(clamped_silu_mul, limit=2.0)])
def test_a_row_does_not_depend_on_the_others(function, dtype):
    """In a width that fills no vector: what is left over of a tensor may be computed otherwise."""
    random = torch.Generator().manual_seed(0)
    gate, up = (3 * torch.randn(23, 51, generator=random).to(dtype) for _ in range(2))
    alone = torch.cat([function(*pair) for pair in zip(gate.split(1), up.split(1))])
    for count in (2, 5, 23):
        assert torch.equal(function(gate[-count:], up[-count:]), alone[-count:])
    assert function(gate[:0], up[:0]).shape == (0, 51)
