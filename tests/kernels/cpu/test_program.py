"""Arguments of a program's operations, and changes of many that are remembered."""

from __future__ import annotations

import pytest

from quantkit_kernels.cpu import program as module
from quantkit_kernels.cpu.driver import FLAGS
from quantkit_kernels.cpu.isa import PLAIN
from quantkit_kernels.cpu.program import Program
from quantkit_kernels.cpu.rows import NormAdd


@pytest.fixture
def made():
    """Three operations."""
    program = Program(PLAIN)
    for size in (3, 4, 5):
        program.add(NormAdd(), size=size)
    program.finish()
    return program


def test_a_change_is_worked_out_once_for_a_key(made):
    calls = []

    def rows(count):
        def how():
            calls.append(count)
            for index in range(3):
                made.set(index, units=count, eps=10 * count + index)
                made.alone(index, count == 1)

        return how

    seen = {}
    for count in (1, 7, 1, 7, 7, 1):
        made.set(1, size=50 + len(seen))  # what others change stays
        made.change(("all", count), rows(count))
        assert [made.get(index, "units") for index in range(3)] == [count] * 3
        assert [made.get(index, "eps") for index in range(3)] == [10 * count + index for index in range(3)]
        flags = made.records[:, FLAGS // 8].tolist()
        assert seen.setdefault(count, flags) == flags
    assert calls == [1, 7] and seen[1] != seen[7]
    assert [made.get(index, "size") for index in range(3)] == [3, 52, 5]


def test_a_change_that_fails_is_not_remembered(made):
    def how():
        made.set(0, units=9)
        raise RuntimeError("broken")

    for _ in range(2):
        with pytest.raises(RuntimeError):
            made.change("key", how)
    made.change("key", lambda: made.set(1, units=4))
    made.set(1, units=1)
    made.change("key", how)
    assert made.get(1, "units") == 4


def test_few_changes_are_remembered(made, monkeypatch):
    monkeypatch.setattr(module, "KNOWN", 2)
    for count in (1, 2, 3, 1, 2, 3):
        made.change(count, lambda count=count: made.set(0, units=count))
        assert made.get(0, "units") == count and len(made._changes) <= 2
