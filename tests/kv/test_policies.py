"""Each policy's choice by its definition, of a view made by hand."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit.kv.base import PolicyView
from quantkit.kv.policies.decoding import H2O, Tova
from quantkit.kv.policies.query_agnostic import ExpectedAttention
from quantkit.kv.policies.snapkv import AdaKV, PyramidKV, SnapKV
from quantkit.kv.policies.window import WindowPolicy


@pytest.fixture
def held():
    """``held(positions, seen, window_attention=…)``; what isn't given may not be asked for."""
    def make(positions: torch.Tensor, seen: int | None = None, *, prompt: int | None = None, layer: int = 0,
             layers: int = 1, **given: torch.Tensor) -> PolicyView:
        def answer(name: str):
            def refuse(*_: object) -> torch.Tensor:
                raise AssertionError(f"the policy asked for {name}, which it doesn't need")

            return (lambda *_: given[name]) if name in given else refuse

        seen = int(positions.max()) + 1 if seen is None else seen
        lengths = tuple((positions >= 0).sum(1).tolist())
        return PolicyView(layer, layers, lengths, seen, seen if prompt is None else prompt, lambda: positions,
                          *map(answer, ("keys", "values", "window_attention", "attention_received",
                                        "future_queries")))
    return make


@pytest.mark.parametrize(("policy", "acts", "declared"), [
    (SnapKV(budget=0.5, window=16), (False, True, False), (None, 16, None)),
    (ExpectedAttention(budget=0.5), (False, True, False), (None, 64, None)),
    (H2O(budget=5, interval=7), (False, True, True), (7, 64, None)),
    (Tova(budget=5, interval=7), (False, True, True), (7, 1, None)),
    (WindowPolicy(budget=5), (True, True, True), (64, 0, (5, 4)))], ids=lambda one: getattr(one, "name", ""))
def test_when_it_acts(policy, acts, declared):
    assert tuple(policy.acts_after(phase) for phase in ("prefill", "prefill_end", "decode")) == acts
    assert (policy.decode_interval, policy.query_window, policy.visible) == declared
    assert policy.tracks_queries("prefill") == (policy.query_window > 0)
    assert policy.tracks_queries("decode") == (policy.query_window > 0 and policy.decode_interval is not None)


@pytest.mark.parametrize("policy", [*(SnapKV(budget=budget) for budget in (40, 41, 1e9)), H2O(budget=40),
                                    Tova(budget=40)])
def test_at_most_so_many_stay_whole_and_nobody_is_asked(held, policy):
    assert policy.keep(held(torch.arange(40).expand(2, -1))) is None


def test_a_share_of_one_token_is_that_token(held):
    assert SnapKV(budget=0.5).keep(held(torch.zeros(2, 1, dtype=torch.int64))) is None


def chosen(weights, kept, window, kernel):
    """Slots of one head: votes of the last queries, averaged over neighbors (zeros outside), the best."""
    groups, queries, total = weights.shape
    residual_length = min(window, kept)
    votes = [sum(float(weights[g, q, s]) for g in range(groups) for q in range(queries)) / (groups * queries)
             for s in range(total - residual_length)]
    half = kernel // 2
    pooled = [sum(votes[j] for j in range(s - half, s - half + kernel) if 0 <= j < len(votes)) / kernel
              for s in range(len(votes))]
    best = sorted(range(len(votes)), key=lambda s: -pooled[s])[:kept - residual_length]
    return sorted(best) + list(range(total - residual_length, total))


@pytest.mark.parametrize(("budget", "kept"), [(0.5, 20), (0.99, 39), (0.001, 1), (7, 7), (7.9, 7), (1, 1),
                                              (39, 39)])
@pytest.mark.parametrize(("window", "kernel"), [(1, 1), (4, 5), (8, 4), (32, 7), (100, 255)])
def test_snapkv_keeps_the_best_and_the_last(held, budget, kept, window, kernel):
    policy = SnapKV(budget=budget, window=window, kernel=kernel)
    weights = torch.rand(2, 3, min(window, 40), 40, generator=torch.Generator().manual_seed(kept)).double()
    mean = weights.mean((1, 2))
    slots = policy.keep(held(torch.arange(40).expand(2, -1), window_attention=mean))
    wanted = [chosen(weights[head], kept, window, kernel) for head in range(2)]
    assert [one.tolist() for one in slots] == wanted
    assert slots[0].dtype == torch.int64


@pytest.mark.parametrize("floor", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("budget", [0.25, 0.5, 12])
def test_adakv_keeps_the_best_of_all_heads_and_of_each_so_many(held, floor, budget):
    weights = torch.rand(3, 40, generator=torch.Generator().manual_seed(2))
    weights[1] *= 0.1  # a head that nobody looks at much
    policy = AdaKV(budget=budget, window=3, kernel=1, floor=floor)
    slots = policy.keep(held(torch.arange(40).expand(3, -1), window_attention=weights))
    count = 12 if budget == 12 else int(40 * budget)
    scores = weights.clone()
    scores[:, -3:] = torch.inf
    chosen = []
    for head in range(3):
        safe = scores[head].topk(max(1, int(count * floor))).indices.tolist()
        chosen += [(head, slot) for slot in sorted({*safe, 37, 38, 39})]
    others = sorted(((float(scores[h, s]), h, s) for h in range(3) for s in range(40)
                     if (h, s) not in chosen), reverse=True)
    chosen += [(h, s) for _, h, s in others[:3 * count - len(chosen)]]
    assert [(h, int(s)) for h, row in enumerate(slots) for s in row] == sorted(chosen)
    if floor < 1:
        assert len({len(row) for row in slots}) > 1


def test_adakv_with_a_floor_of_1_is_snapkv(held):
    weights = torch.rand(3, 40, generator=torch.Generator().manual_seed(3))
    options = {"budget": 0.4, "window": 5, "kernel": 3}
    mine, its = (kind.keep(held(torch.arange(40).expand(3, -1), window_attention=weights))
                 for kind in (AdaKV(**options, floor=1), SnapKV(**options)))
    assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))


def test_heads_of_different_lengths(held):
    """A second prompt in the same conversation: nothing beyond a head's end is ever kept."""
    positions = torch.stack((torch.arange(40), torch.cat((torch.arange(10, 40), torch.full((10,), -1)))))
    weights = torch.rand(2, 40, generator=torch.Generator().manual_seed(4)).masked_fill(positions < 0, 0.0)
    for kind in (AdaKV(budget=0.5, window=4), SnapKV(budget=0.5, window=4)):
        slots = kind.keep(held(positions, window_attention=weights))
        assert sum(map(len, slots)) == 20 + 20
        assert slots[0][-4:].tolist() == [36, 37, 38, 39] and slots[1][-4:].tolist() == [26, 27, 28, 29]


def kept(held, policy, length, layers):
    positions = torch.arange(length).expand(2, -1)
    weights = torch.rand(2, length, generator=torch.Generator().manual_seed(1))
    found = []
    for layer in range(layers):
        slots = policy.keep(held(positions, layer=layer, layers=layers, window_attention=weights))
        counts = {length} if slots is None else {len(row) for row in slots}
        assert len(counts) == 1
        found.append(counts.pop())
    return found


@pytest.mark.parametrize(("budget", "mean"), [(0.25, 250), (0.5, 500), (300, 300)])
def test_pyramidkv_budgets_fall_by_equal_steps(held, budget, mean):
    counts = kept(held, PyramidKV(budget=budget, window=8), 1000, 11)
    steps = {a - b for a, b in itertools.pairwise(counts)}
    assert abs(sum(counts) / 11 - mean) <= 0.5 and max(steps) - min(steps) <= 1 and min(steps) > 0
    assert counts[-1] >= mean // 20 and counts[0] <= 1000 - 8


def test_pyramidkv_the_last_layer_keeps_the_mean_over_beta(held):
    assert kept(held, PyramidKV(budget=100, window=4, beta=10), 1000, 5)[-1] == 10
    assert kept(held, PyramidKV(budget=100, window=4, beta=1), 1000, 5) == [100] * 5


def test_pyramidkv_where_the_top_would_be_narrower_than_the_window_all_keep_the_same(held):
    assert kept(held, PyramidKV(budget=40, window=32), 1000, 5) == [40] * 5


def test_pyramidkv_one_layer(held):
    assert kept(held, PyramidKV(budget=0.5, window=4), 100, 1) == [50]


def test_pyramidkv_a_short_prompt_stays_whole(held):
    assert kept(held, PyramidKV(budget=2000), 100, 3) == [100] * 3


def test_pyramidkv_a_second_prompt_is_shared_out_as_one_that_came_at_once(held):
    """Layers hold different numbers by then; budgets are of all that there was, or all that is left."""
    policy, once, later = PyramidKV(budget=0.3, window=8), [], []
    for layer, length in enumerate((900, 500, 100)):
        for found, count in ((once, 1000), (later, length)):
            positions = torch.arange(count).expand(2, -1)
            slots = policy.keep(held(positions, 1000, prompt=1000, layer=layer, layers=3,
                                     window_attention=torch.rand(2, count)))
            found.append(count if slots is None else len(slots[0]))
    assert sum(once) == 900 and later == [min(a, b) for a, b in zip(once, (900, 500, 100))]


def expected_case(seed=0, total=40):
    make = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(2, total, 8, generator=make) for _ in range(2))
    mean, half = torch.randn(4, 8, generator=make), torch.randn(4, 8, 8, generator=make) * 0.2
    return keys, values, mean, half @ half.mT


def test_expected_keeps_what_samples_look_at(held):
    keys, values, mean, covariance = expected_case()
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


def test_expected_short_prompts_stay_whole(held):
    assert ExpectedAttention(budget=0.5).keep(held(torch.arange(4).expand(2, -1))) is None
    assert ExpectedAttention(budget=50).keep(held(torch.arange(40).expand(2, -1))) is None


def test_expected_sinks_are_positions_not_slots(held):
    keys, values, mean, covariance = expected_case(1)
    positions = torch.arange(40).repeat(2, 1) + torch.tensor([[0], [1]])  # the second head lost its first
    slots = ExpectedAttention(budget=0.25, sinks=2).keep(held(
        positions, keys=keys, values=values * 1e-6, future_queries=(mean, covariance)))
    assert slots[0][:2].tolist() == [0, 1] and slots[1][0] == 0


@pytest.mark.parametrize(("budget", "recent", "kept", "newest"), [
    (10, 0.5, 10, 5), (0.5, 0.25, 20, 5), (7, 0, 7, 1), (7, 1, 7, 7)])
def test_h2o_keeps_the_newest_and_the_heaviest(held, budget, recent, kept, newest):
    sums = torch.rand(2, 40, generator=torch.Generator().manual_seed(kept))
    slots = H2O(budget=budget, recent=recent).keep(held(torch.arange(40).expand(2, -1),
                                                        attention_received=sums))
    for head in range(2):
        heavy = sorted(range(40 - newest), key=lambda s: -sums[head, s])[:kept - newest]
        assert slots[head].tolist() == sorted(heavy) + list(range(40 - newest, 40))


def test_h2o_a_share_is_of_the_prompt_and_stays_that(held):
    sums = torch.rand(2, 60, generator=torch.Generator().manual_seed(0))
    slots = H2O(budget=0.5).keep(held(torch.arange(60).expand(2, -1), prompt=40, attention_received=sums))
    assert {len(row) for row in slots} == {20}


@pytest.mark.parametrize("budget", [2, 3, 10, 19])
def test_tova_keeps_the_best_of_all_heads_and_the_newest(held, budget):
    weights = torch.rand(2, 3, 1, 20, generator=torch.Generator().manual_seed(budget))
    weights[..., -1] = 0  # the newest stays though nobody looks at it
    slots = Tova(budget=budget).keep(held(torch.arange(20).expand(2, -1),
                                          window_attention=weights.mean((1, 2))))
    mean = weights[:, :, 0].mean((0, 1))
    wanted = [*sorted(sorted(range(19), key=lambda s: -mean[s])[:budget - 1]), 19]
    assert [one.tolist() for one in slots] == [wanted, wanted]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(budget=st.integers(1, 30), sinks=st.integers(0, 10), chunks=st.lists(st.integers(1, 40), max_size=6))
def test_window_keeps_what_the_next_query_sees(held, budget, sinks, chunks):
    policy, positions, seen = WindowPolicy(budget=budget, sinks=sinks), [], 0
    for count in chunks:
        positions += range(seen, seen + count)
        seen += count
        slots = policy.keep(held(torch.tensor([positions] * 3), seen))
        if slots is not None:
            assert slots.shape[0] == 3 and (slots == slots[0]).all()
            positions = [positions[slot] for slot in slots[0]]
        wanted = [p for p in range(seen + 1) if p < sinks or p > seen - budget]
        assert [*positions, seen] == wanted
