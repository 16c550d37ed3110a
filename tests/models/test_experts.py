"""Experts: who gets which token, and that a token's result is its own."""

from __future__ import annotations

import pytest
import torch

from quantkit.models.architecture import parse_config
from quantkit.models.layers import MixtureOfExperts, by_expert, route
from quantkit.models.linear import Weights
from quantkit.ops.stored_weight import PlainWeight
from quantkit.support.errors import SourceError
from quantkit.testing import tiny_weights


@pytest.fixture(params=["mixtral", "qwen2_moe", "qwen3_moe"])
def made(request, make_config):
    """A layer of experts and its tensors."""
    config = make_config(request.param)
    weights = tiny_weights(config)
    source = Weights(weights.__getitem__, weights.__contains__, torch.float32)
    return MixtureOfExperts(parse_config(config), 0, source), weights


def states(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_routes_are_the_largest_shares_and_the_first_of_equals():
    scores = torch.tensor([[0.0, 2.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0]])
    chosen, shares = route(scores, 2, False)
    assert chosen.tolist() == [[1, 3], [0, 1]]
    torch.testing.assert_close(shares, scores.softmax(-1).gather(1, chosen))
    chosen, shares = route(scores.bfloat16(), 3, True)
    assert chosen.tolist() == [[1, 3, 2], [0, 1, 2]] and shares.dtype == torch.float32
    torch.testing.assert_close(shares.sum(-1), torch.ones(2))


def test_every_choice_goes_to_its_expert_once():
    chosen = torch.stack([torch.randperm(7)[:3] for _ in range(11)])
    seen, numbers = set(), []
    for number, rows, places in by_expert(chosen):
        numbers.append(number)
        assert rows.tolist() == sorted(set(rows.tolist()))
        assert (chosen[rows, places] == number).all()
        seen |= {(int(row), int(place)) for row, place in zip(rows, places)}
    assert numbers == sorted(set(numbers)) and len(seen) == 33
    assert list(by_expert(chosen[:0])) == []


def test_the_result_is_the_weighted_sum_in_float64(made):
    layer, weights = made
    x = states(2, 5, 64)
    (name,) = (key.removesuffix(".gate.weight") for key in weights
               if key.endswith(("0.mlp.gate.weight", "0.block_sparse_moe.gate.weight")))
    parts = ("w1", "w3", "w2") if name.endswith("moe") else ("gate_proj", "up_proj", "down_proj")
    expected = torch.zeros(10, 64, dtype=torch.float64)
    for row, token in enumerate(x.view(10, 64).double()):
        shares = (weights[f"{name}.gate.weight"].double() @ token).softmax(-1)
        best = shares.argsort(descending=True)[:2]
        for number in best:
            gate, up, down = (weights[f"{name}.experts.{number}.{part}.weight"].double() for part in parts)
            inner = torch.nn.functional.silu(gate @ token) * (up @ token)
            expected[row] += shares[number] / (shares[best].sum() if layer.shared is None else 1) * (
                down @ inner)
        if layer.shared is not None:
            gate, up, down = (weights[f"{name}.shared_expert.{part}.weight"].double() for part in parts)
            share = (weights[f"{name}.shared_expert_gate.weight"].double() @ token).sigmoid()
            expected[row] += share * (down @ (torch.nn.functional.silu(gate @ token) * (up @ token)))
    assert (layer(x).view(10, 64) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["torch", "packed"])
def test_a_token_gets_the_same_bits_in_any_company(made, dtype, packed):
    layer, _ = made
    for linear in (layer.router, *layer.linears()):
        weight = PlainWeight(linear.weight.tensor.to(dtype))
        linear.weight = weight.packed(dtype) if packed else weight
    x = states(16, 1, 64).to(dtype)
    together = layer(x)
    for size in (1, 3, 15):
        assert torch.equal(torch.cat([layer(some) for some in x.split(size)]), together)
    assert torch.equal(layer(x.flip(0)).flip(0), together)
    assert layer(x[:0]).shape == (0, 1, 64)


def test_a_watcher_is_told_which_tokens_an_expert_got(made):
    layer, _ = made
    seen = {}
    for one in layer.linears():
        one.observer = lambda x, rows=None, name=one.name: seen.setdefault(name, (x, rows))
    x = states(3, 4, 64)
    layer(x)
    assert all((rows is None) == (".shared_expert." in name) for name, (_, rows) in seen.items())
    seen = {name: given for name, given in seen.items() if given[1] is not None}
    counts = {name: len(rows) for name, (_, rows) in seen.items()}
    assert sum(counts.values()) == 3 * 2 * 12
    for name, (entered, rows) in seen.items():
        if not name.endswith(("w2", "down_proj")):
            assert torch.equal(entered, x.view(12, 64)[rows])


def test_a_router_of_another_shape_is_named(make_config):
    config = make_config("qwen3_moe")
    weights = tiny_weights(config) | {"model.layers.1.mlp.gate.weight": torch.zeros(5, 64)}
    with pytest.raises(SourceError, match=r"layers\.1\.mlp\.gate\.weight has shape \[5, 64\]"):
        MixtureOfExperts(parse_config(config), 1,
                         Weights(weights.__getitem__, weights.__contains__, torch.float32))
