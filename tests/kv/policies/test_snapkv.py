"""SnapKV's choice by its definition, in plain Python."""

from __future__ import annotations

import pytest
import torch

from quantkit.kv.policies.snapkv import SnapKV


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
def test_the_best_and_the_last(held, budget, kept, window, kernel):
    policy = SnapKV(budget=budget, window=window, kernel=kernel)
    weights = torch.rand(2, 3, min(window, 40), 40, generator=torch.Generator().manual_seed(kept)).double()
    mean = weights.mean((1, 2))
    slots = policy.keep(held(torch.arange(40).expand(2, -1), window_attention=mean))
    wanted = [chosen(weights[head], kept, window, kernel) for head in range(2)]
    assert [one.tolist() for one in slots] == wanted
    assert slots[0].dtype == torch.int64


@pytest.mark.parametrize("budget", [40, 41, 1e9])
def test_a_short_prompt_stays_whole_and_nobody_is_asked(held, budget):
    assert SnapKV(budget=budget).keep(held(torch.arange(40).expand(2, -1))) is None
    assert SnapKV(budget=0.5).keep(held(torch.zeros(2, 1, dtype=torch.int64))) is None


def test_when_it_acts():
    policy = SnapKV(budget=0.5, window=16)
    acts = [policy.acts_after(phase) for phase in ("prefill", "prefill_end", "decode")]
    assert acts == [False, True, False]
    assert (policy.decode_interval, policy.query_window, policy.visible) == (None, 16, None)
