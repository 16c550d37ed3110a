"""What is measured of this machine: rates that are counted right, on work that is really done."""

from __future__ import annotations

import itertools

import pytest
import torch

from quantkit.evaluation.roofline import ceilings
from quantkit.ops import cpu_linear, cpu_machine, cpu_weight
from quantkit.support.errors import UsageError


def test_operations_are_two_for_each_number_and_row(monkeypatch):
    """A clock that goes on by a sixteenth of a second at every look: that is what each product takes."""
    clock = itertools.count(step=0.0625)
    monkeypatch.setattr(ceilings.time, "perf_counter", lambda: next(clock))
    packed = cpu_weight.pack_plain(torch.ones(64, 96, dtype=torch.bfloat16))
    assert ceilings.flops(packed) == pytest.approx(2 * 512 * 64 * 96 / 0.0625)


def test_the_fastest_measurement_is_the_ceiling(monkeypatch):
    rates = iter([9.0, 1.0, 3.0, 2.0])
    monkeypatch.setattr(ceilings, "bandwidth", lambda device: lambda: next(rates))
    assert ceilings.read_bandwidth() == 3.0, "the first read takes the memory, and doesn't count"
    ends = iter([0.0, 0.0, 0.2, 0.2, 0.2, 0.25, 0.9])  # products of 0.2 and of 0.05 s
    monkeypatch.setattr(ceilings.time, "perf_counter", lambda: next(ends))
    packed = cpu_weight.pack_plain(torch.ones(64, 96, dtype=torch.bfloat16))
    assert ceilings.flops(packed) == pytest.approx(2 * 512 * 64 * 96 / 0.05)


def test_without_kernels_it_says_what_to_give(monkeypatch):
    for module in (cpu_linear, cpu_machine):
        monkeypatch.setattr(module, "unavailable", lambda: "llvmlite is not installed")
    with pytest.raises(UsageError, match="can't be measured") as caught:
        ceilings.read_bandwidth()
    assert "--bandwidth and --flops" in str(caught.value.next)
