"""TOVA: the newest query votes."""

from __future__ import annotations

import pytest
import torch

from quantkit.kv.policies.decoding import Tova


@pytest.mark.parametrize("budget", [2, 3, 10, 19])
def test_the_best_of_all_heads_and_the_newest(held, budget):
    weights = torch.rand(2, 3, 1, 20, generator=torch.Generator().manual_seed(budget))
    weights[..., -1] = 0  # the newest stays though nobody looks at it
    slots = Tova(budget=budget).keep(held(torch.arange(20).expand(2, -1),
                                          window_attention=weights.mean((1, 2))))
    mean = weights[:, :, 0].mean((0, 1))
    wanted = [*sorted(sorted(range(19), key=lambda s: -mean[s])[:budget - 1]), 19]
    assert [one.tolist() for one in slots] == [wanted, wanted]


def test_at_most_so_many_stay_whole(held):
    assert Tova(budget=20).keep(held(torch.arange(20).expand(2, -1))) is None


def test_when_it_acts():
    policy = Tova(budget=5, interval=7)
    acts = [policy.acts_after(phase) for phase in ("prefill", "prefill_end", "decode")]
    assert acts == [False, True, True]
    assert (policy.decode_interval, policy.query_window, policy.visible) == (7, 1, None)
