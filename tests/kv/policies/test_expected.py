"""Expected Attention: the formula against samples, and what stays by its definition."""

from __future__ import annotations

import torch

from quantkit.kv.policies.query_agnostic import ExpectedAttention


def case(seed=0, total=40):
    make = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(2, total, 8, generator=make) for _ in range(2))
    mean, half = torch.randn(4, 8, generator=make), torch.randn(4, 8, 8, generator=make) * 0.2
    return keys, values, mean, half @ half.mT


def test_what_stays_is_what_samples_look_at(held):
    keys, values, mean, covariance = case()
    slots = ExpectedAttention(budget=0.5, sinks=2).keep(held(
        torch.arange(40).expand(2, -1), keys=keys, values=values, future_queries=(mean, covariance)))
    normal = torch.distributions.MultivariateNormal(mean.double(), covariance.double() + 1e-9 * torch.eye(8))
    torch.manual_seed(0)
    queries = normal.sample((200_000,)).transpose(0, 1)  # [H, n, D]
    for head in range(2):
        looked = torch.zeros(40, dtype=torch.float64)
        for q in queries[2 * head:2 * head + 2]:
            raised = (q @ keys[head].double().mT).exp().mean(0)
            looked[2:] += raised[2:] / raised[2:].sum()
        looked *= values[head].double().norm(dim=-1)
        kept = set(slots[head].tolist())
        assert {0, 1} <= kept and len(kept) == 20
        ranked = looked[2:].sort(descending=True)
        edge = float(ranked.values[17])
        for slot in range(2, 40):  # a sample's mean is within a few percent of the formula
            assert (slot in kept) or looked[slot] < 1.1 * edge
            assert (slot not in kept) or looked[slot] > 0.9 * edge


def test_short_prompts_stay_whole(held):
    assert ExpectedAttention(budget=0.5).keep(held(torch.arange(4).expand(2, -1))) is None
    assert ExpectedAttention(budget=50).keep(held(torch.arange(40).expand(2, -1))) is None


def test_sinks_are_positions_not_slots(held):
    keys, values, mean, covariance = case(1)
    positions = torch.arange(40).repeat(2, 1) + torch.tensor([[0], [1]])  # the second head lost its first
    slots = ExpectedAttention(budget=0.25, sinks=2).keep(held(
        positions, keys=keys, values=values * 1e-6, future_queries=(mean, covariance)))
    assert slots[0][:2].tolist() == [0, 1] and slots[1][0] == 0


def test_when_it_acts():
    policy = ExpectedAttention(budget=0.5)
    assert policy.tracks_queries("prefill") and not policy.tracks_queries("decode")
    assert policy.acts_after("prefill_end") and not policy.acts_after("decode")
