"""The most likely token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit_kernels.cpu.argmax import argmax
from tests.kernels.cpu import reference

FEW = st.sampled_from([-3e38, -2.0, -1e-45, -0.0, 0.0, 1.0, 2.0, 3e38])
ANY = st.floats(width=32)


@pytest.mark.sampled(3)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(FEW, min_size=1, max_size=70))
def test_the_lowest_index_of_the_largest(isa, values):
    assert argmax(torch.tensor(values), isa) == values.index(max(values))


@pytest.mark.sampled(3)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(FEW, min_size=1, max_size=70) | st.lists(ANY, min_size=1, max_size=70))
def test_the_answer_of_the_reference(isa, values):
    values = torch.tensor(values)
    assert argmax(values, isa) == reference.argmax(values.numpy())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 15, 16, 47, 48, 50])
def test_what_is_not_finite_is_seen_anywhere(isa, bad, at):
    values = torch.zeros(51)
    values[at] = bad
    assert argmax(values, isa) is None
    values[at] = 1
    assert argmax(values, isa) == at


def test_nothing_has_no_largest(fastest):
    with pytest.raises(ValueError, match="nothing"):
        argmax(torch.empty(0), fastest)


def test_a_vocabulary(isa):
    values = torch.randn(49_152, generator=torch.Generator().manual_seed(0))
    assert argmax(values, isa) == int(values.argmax())
    assert argmax(torch.stack((values, values), 1)[:, 1], isa) == int(values.argmax())
