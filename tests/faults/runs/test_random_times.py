"""Killed at any time, not only where something is written, and run again: the same bytes."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time

import pytest

from quantkit.checkpoint import durable

KILLS = 200


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk() -> None:
    """Not here: writing takes the time that it takes."""


@pytest.mark.slow
def test_200_kills(every_case, run_of, tmp_path, figures):
    """Three in four after a run has made its folder: what goes before loses nothing."""
    chance, landed, missed = random.Random(2026), 0, 0
    stages = dict.fromkeys(("before a unit was kept", "between units", "assembling", "published"), 0)
    methods: dict[str, int] = {}
    for trial, case in enumerate(itertools.cycle(every_case)):
        if landed == KILLS:
            break
        run, out = run_of(case), tmp_path / str(trial) / "out"
        out.parent.mkdir()
        began, took = times(run)
        after = chance.uniform(0 if trial % 4 == 0 else began, took)
        if not killed(lambda run=run, out=out: run(out), after):
            missed += 1
            continue
        landed += 1
        methods[case.method] = methods.get(case.method, 0) + 1
        partial = out.with_name("out.partial")
        stages["published" if out.exists() else "assembling" if (partial / "checkpoint").exists() else
               "between units" if list(partial.glob("part-*.json")) else "before a unit was kept"] += 1
        run.again(out)
    figures["killed at random times"] = {
        "kills": landed, "ended byte-identical": landed, "by method": methods,
        "over before the signal": missed, "where": stages}
    assert landed == KILLS and min(stages["between units"], stages["assembling"]) > 10


def times(run) -> tuple[float, float]:
    """When an undisturbed run makes its folder, and how long it takes, in seconds."""
    assert run.reference
    if not hasattr(run, "times"):
        marks: list[float] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(durable, "step", lambda what: marks.append(time.monotonic()))
            start = time.monotonic()
            run(run.folder / "timed")
        run.times = marks[0] - start, time.monotonic() - start
    return run.times


def killed(work, after: float) -> bool:
    """Whether a process that does ``work`` was still at it when the signal came, ``after`` seconds later."""
    if (pid := os.fork()) == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    time.sleep(after)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
