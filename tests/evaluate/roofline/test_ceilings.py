"""What is measured of this machine: rates that are counted right, on work that is really done."""

from __future__ import annotations

import itertools

import pytest
import torch

from quantkit.errors import UsageError
from quantkit.evaluate.roofline import ceilings
from quantkit.ops import cpu_linear, cpu_machine, cpu_weight


def test_operations_are_two_for_each_number_and_row(monkeypatch):
    """A clock that goes on by a sixteenth of a second at every look: one at the beginning, one before each
    product. One is done when more than a tenth has passed, at 0.125 s."""
    clock = itertools.count(step=0.0625)
    monkeypatch.setattr(ceilings.time, "perf_counter", lambda: next(clock))
    packed = cpu_weight.pack_plain(torch.ones(64, 96, dtype=torch.bfloat16))
    found = ceilings.flops(packed)
    assert found == pytest.approx(2 * 512 * 64 * 96 / 0.125)


def test_without_kernels_it_says_what_to_give(monkeypatch):
    for module in (cpu_linear, cpu_machine):
        monkeypatch.setattr(module, "unavailable", lambda: "llvmlite is not installed")
    with pytest.raises(UsageError, match="can't be measured") as caught:
        ceilings.read_bandwidth()
    assert "--bandwidth and --flops" in str(caught.value.next)
