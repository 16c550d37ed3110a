"""Threads that run programs: every unit once, in order of the barriers, whatever else the machine does."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

import pytest
import torch

from quantkit_kernels.cpu import driver
from quantkit_kernels.cpu.isa import PLAIN
from quantkit_kernels.cpu.pool import Pool, cores
from quantkit_kernels.cpu.program import Program
from quantkit_kernels.cpu.values import I64


class Count:
    """``to[unit] += from[unit] + 1``, or into a row of the thread's own."""

    name = "count"

    @staticmethod
    def emit(module, isa):
        e, a, unit, thread = driver.begin(module, "count", Count.arguments)
        where = a.to + thread * a.private + unit * 8
        e.store(where, e.load(where, I64) + e.load(a.source, I64, unit * 8) + 1)
        e.ret()

    arguments = ("*to", "*source", "private")


@pytest.fixture
def count():
    """``count(pool, steps, units, barrier)`` runs a chain of counts; what the last one made."""
    def run(pool, steps, units, rounds=1):
        rows = torch.zeros(steps + 1, units, dtype=torch.int64)
        program = Program(PLAIN)
        for step in range(steps):
            program.add(Count(), units, to=rows[step + 1], source=rows[step])
        program.finish()
        for _ in range(rounds):
            rows.zero_()
            pool.run(program.records)
            assert torch.equal(rows, torch.arange(steps + 1)[:, None].expand(-1, units))

    return run


@pytest.mark.sampled(4)
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("units", [1, 2, 7, 64])
def test_every_unit_once_and_after_what_it_needs(count, threads, units):
    pool = Pool(threads)
    count(pool, 60, units, rounds=20)
    pool.close()


def test_operations_without_a_barrier_share_the_next_one():
    pool, made = Pool(2), torch.zeros(9, 5, dtype=torch.int64)
    nothing = torch.zeros(5, dtype=torch.int64)
    program = Program(PLAIN)
    for index, row in enumerate(made[:8]):
        program.add(Count(), 5, to=row, source=nothing, barrier=index == 7)
    program.add(Count(), 0, to=nothing, source=nothing)
    program.add(Count(), 5, to=made[8], source=made[7])
    program.finish()
    for turn in range(1, 30):
        pool.run(program.records)
        assert (made[:8] == turn).all()
    assert (made[8] == sum(turn + 1 for turn in range(1, 30))).all()
    pool.close()


def test_each_thread_for_itself():
    pool, made, source = Pool(2), torch.zeros(2, 16, dtype=torch.int64), torch.arange(16)
    program = Program(PLAIN)
    program.add(Count(), 16, to=made, source=source, private=16 * 8, each=True)
    program.finish()
    pool.run(program.records)
    assert torch.equal(made, (source + 1).expand(2, -1))
    pool.close()


def test_an_operation_may_say_how_many_units_a_later_one_has():
    pool, made, times = Pool(2), torch.zeros(12, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    source, program = torch.zeros(12, dtype=torch.int64), Program(PLAIN)
    program.add(Count(), 1, to=times, source=source)
    program.add(Count(), 3, to=made, source=source, times=times)
    program.finish()
    for turn in range(1, 5):
        pool.run(program.records)
        assert made.count_nonzero() == 3 * turn
    assert made.tolist() == [4] * 3 + [3] * 3 + [2] * 3 + [1] * 3
    pool.close()


def test_threads_that_slept_come_back(count):
    pool = Pool(2)
    for _ in range(3):
        count(pool, 5, 8)
        time.sleep(0.05)
    pool.close()
    count(pool, 5, 8)
    pool.close()


def test_callers_take_turns(count):
    pool, faults = Pool(2), []

    def call():
        try:
            count(pool, 20, 8, rounds=30)
        except BaseException as error:
            faults.append(error)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    pool.close()
    assert not faults and not any(caller.is_alive() for caller in callers)


def _burn(stop):
    while not stop.is_set():
        sum(range(10_000))


@pytest.mark.slow
def test_it_gets_on_while_others_want_the_cores(count):
    """Barriers that spin without end would take a time slice each: thousands of them, minutes."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    others = [context.Process(target=_burn, args=(stop,)) for _ in range(2 * cores())]
    for other in others:
        other.start()
    try:
        count(Pool(2), 200, 8, rounds=10)
    finally:
        stop.set()
        for other in others:
            other.join(30)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_gets_threads_of_its_own(count):
    pool = Pool(2)
    count(pool, 5, 8)
    child = os.fork()
    if child == 0:
        try:
            count(pool, 5, 8)
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    count(pool, 5, 8)
    pool.close()


def test_no_more_threads_than_a_mask_holds():
    assert Pool(1000).threads == driver.MOST and 1 <= cores() <= (os.cpu_count() or 1)
    with pytest.raises(ValueError, match="-1 threads"):
        Pool(-1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_process_forked_in_the_middle_of_a_job_is_free_to_run_its_own(count):
    pool = Pool(2)
    with pool._lock:  # as another thread's job holds it
        child = os.fork()
        if child == 0:
            try:
                count(pool, 5, 8)
                os._exit(0)
            finally:
                os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("when", ["_start", "_run"])
def test_an_interrupted_caller_leaves_no_thread_behind(count, monkeypatch, when):
    """Ctrl-C comes in Python: just after machine code began a job, or before this thread's part of it."""
    pool = Pool(2)
    count(pool, 5, 8)
    real, hit = getattr(pool, when), []

    def interrupted(*args):
        if hit:
            return real(*args)
        hit.append(1)
        if when == "_start":
            real(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(pool, when, interrupted)
    with pytest.raises(KeyboardInterrupt):
        count(pool, 5, 8)
    count(pool, 5, 8, rounds=20)
    pool.close()


def test_a_misspelled_argument_is_named():
    with pytest.raises(TypeError, match="no argument 'too'; it has to, source, private"):
        Program(PLAIN).add(Count(), 1, too=None)

