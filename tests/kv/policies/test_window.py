"""The window and its sinks."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit.kv.policies.window import WindowPolicy


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(budget=st.integers(1, 30), sinks=st.integers(0, 10), chunks=st.lists(st.integers(1, 40), max_size=6))
def test_what_stays_is_what_the_next_query_sees(held, budget, sinks, chunks):
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


def test_when_it_acts():
    policy = WindowPolicy(budget=5)
    acts = [policy.acts_after(phase) for phase in ("prefill", "prefill_end", "decode")]
    assert acts == [True, True, True]
    assert (policy.decode_interval, policy.query_window, policy.visible) == (64, 0, (5, 4))
