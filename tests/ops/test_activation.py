from __future__ import annotations

import torch

from quantkit.ops.activation import silu_mul


def test_formula_and_untouched_arguments(obeys_the_rule):
    random = torch.Generator().manual_seed(0)
    gate, up = (3 * torch.randn(4, 33, generator=random) for _ in range(2))
    before = gate.clone(), up.clone()
    exact = gate.double() * torch.sigmoid(gate.double()) * up.double()
    obeys_the_rule(silu_mul(gate, up), gate * torch.sigmoid(gate) * up, exact)
    assert torch.equal(gate, before[0]) and torch.equal(up, before[1])
