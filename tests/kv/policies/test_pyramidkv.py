"""PyramidKV's budgets fall by equal steps and have the mean that was asked for."""

from __future__ import annotations

import itertools

import pytest
import torch

from quantkit.kv.policies.snapkv import PyramidKV


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
def test_budgets_fall_by_equal_steps(held, budget, mean):
    counts = kept(held, PyramidKV(budget=budget, window=8), 1000, 11)
    steps = {a - b for a, b in itertools.pairwise(counts)}
    assert abs(sum(counts) / 11 - mean) <= 0.5 and max(steps) - min(steps) <= 1 and min(steps) > 0
    assert counts[-1] >= mean // 20 and counts[0] <= 1000 - 8


def test_the_last_layer_keeps_the_mean_over_beta(held):
    assert kept(held, PyramidKV(budget=100, window=4, beta=10), 1000, 5)[-1] == 10
    assert kept(held, PyramidKV(budget=100, window=4, beta=1), 1000, 5) == [100] * 5


def test_where_the_top_would_be_narrower_than_the_window_all_keep_the_same(held):
    assert kept(held, PyramidKV(budget=40, window=32), 1000, 5) == [40] * 5


def test_one_layer(held):
    assert kept(held, PyramidKV(budget=0.5, window=4), 100, 1) == [50]


def test_a_short_prompt_stays_whole(held):
    assert kept(held, PyramidKV(budget=2000), 100, 3) == [100] * 3


def test_a_second_prompt_is_shared_out_as_one_that_came_at_once(held):
    """Layers hold different numbers by then; budgets are of all that there was, or all that is left."""
    policy, once, later = PyramidKV(budget=0.3, window=8), [], []
    for layer, length in enumerate((900, 500, 100)):
        for found, count in ((once, 1000), (later, length)):
            positions = torch.arange(count).expand(2, -1)
            slots = policy.keep(held(positions, 1000, prompt=1000, layer=layer, layers=3,
                                     window_attention=torch.rand(2, count)))
            found.append(count if slots is None else len(slots[0]))
    assert sum(once) == 900 and later == [min(a, b) for a, b in zip(once, (900, 500, 100))]
