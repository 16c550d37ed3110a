"""H2O by its definition."""

from __future__ import annotations

import pytest
import torch

from quantkit.kv.policies.decoding import H2O


@pytest.mark.parametrize(("budget", "recent", "kept", "newest"), [
    (10, 0.5, 10, 5), (0.5, 0.25, 20, 5), (7, 0, 7, 1), (7, 1, 7, 7)])
def test_the_newest_and_the_heaviest(held, budget, recent, kept, newest):
    sums = torch.rand(2, 40, generator=torch.Generator().manual_seed(kept))
    slots = H2O(budget=budget, recent=recent).keep(held(torch.arange(40).expand(2, -1),
                                                        attention_received=sums))
    for head in range(2):
        heavy = sorted(range(40 - newest), key=lambda s: -sums[head, s])[:kept - newest]
        assert slots[head].tolist() == sorted(heavy) + list(range(40 - newest, 40))


def test_a_share_is_of_the_prompt_and_stays_that(held):
    sums = torch.rand(2, 60, generator=torch.Generator().manual_seed(0))
    slots = H2O(budget=0.5).keep(held(torch.arange(60).expand(2, -1), prompt=40, attention_received=sums))
    assert {len(row) for row in slots} == {20}


def test_nothing_is_asked_where_all_stays(held):
    assert H2O(budget=40).keep(held(torch.arange(40).expand(2, -1))) is None


def test_when_it_acts():
    policy = H2O(budget=5, interval=7)
    acts = [policy.acts_after(phase) for phase in ("prefill", "prefill_end", "decode")]
    assert acts == [False, True, True]
    assert policy.decode_interval == 7
    assert policy.tracks_queries("prefill") and policy.tracks_queries("decode")
