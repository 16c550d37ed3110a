"""How busy a machine was, from counters that a test writes."""

import dataclasses

import pytest

from quantkit.evaluation.speed import machine_load
from quantkit.evaluation.speed.machine_load import (
    LoadSample,
    MachineLoad,
    busy_now,
    busy_reason,
    timed_quietly,
)
from quantkit.evaluation.sweep import jobs
from quantkit.evaluation.sweep.models import ModelRef
from quantkit.evaluation.sweep.store import MeasurementStore

QUIET, BUSY = MachineLoad(stolen=0.0, others=0.02), MachineLoad(stolen=0.01, others=0.6)


def test_the_counters_of_the_processors_that_may_be_used(monkeypatch, tmp_path):
    stat = tmp_path / "stat"
    stat.write_text("cpu  9 9 9 9 9 9 9 9\ncpu0 100 20 30 500 5 1 2 40 0 0\ncpu1 7 7 7 7 7 7 7 7\nintr 1\n")
    monkeypatch.setattr(machine_load, "STAT", stat)
    monkeypatch.setattr(machine_load.os, "sched_getaffinity", lambda process: {0})
    monkeypatch.setattr(machine_load.os, "sysconf", lambda name: 100)
    sample = LoadSample.now()
    assert (sample.worked, sample.stolen) == (1.53, 0.4)
    for content in ("cpu0 1 2\n", "cpu0 a b c d e f g h\n", "intr 1\n"):
        stat.write_text(content)
        assert LoadSample.now() is None
    stat.unlink()
    assert LoadSample.now() is None


@pytest.mark.parametrize(("processors", "threads", "others"), [(2, 2, 0.25), (2, 1, 0.0), (4, 2, 0.0)])
def test_what_others_worked_on_processors_that_the_timed_threads_want(processors, threads, others):
    before, after = LoadSample(0.0, 10.0, 0.0, 5.0), LoadSample(2.0, 14.0, 0.2, 8.0)
    load = after.since(before, processors, threads)
    assert load.others == pytest.approx(others) and load.stolen == pytest.approx(0.1 / processors)


def test_a_busy_machine_is_named_and_a_quiet_one_is_not():
    assert busy_reason(None) is None and busy_reason(QUIET) is None
    assert busy_reason(BUSY) == ("the machine was busy: up to 60% of the processors' time went to other "
                                 "programs")
    assert "other machines of the host" in busy_reason(MachineLoad(stolen=0.3, others=0.0))


def test_it_is_timed_again_until_it_is_quiet_and_no_more_than_three_times(monkeypatch):
    loads, runs = iter([BUSY, QUIET, BUSY]), []
    monkeypatch.setattr(LoadSample, "now", classmethod(lambda cls: LoadSample(0.0, 0.0, 0.0, 0.0)))
    monkeypatch.setattr(LoadSample, "since", lambda self, before, processors, threads: next(loads))
    assert timed_quietly(lambda: runs.append(1) or len(runs), lambda run: 0.0, 1) == (2, QUIET)
    loads, runs = iter([BUSY] * 9), []
    assert timed_quietly(lambda: runs.append(1) or len(runs), lambda run: 0.0, 1) == (1, BUSY)
    assert len(runs) == machine_load.ROUNDS
    loads, runs = iter([BUSY] * 9), []
    assert timed_quietly(lambda: runs.append(1) or len(runs), lambda run: 0.0, None) == (1, None)
    assert len(runs) == 1, "busy processors are no reason to time a GPU again"
    loads, runs = iter([QUIET] * 9), []
    assert timed_quietly(lambda: runs.append(1) or len(runs), lambda run: 1 / run, 1)[0] == 3, (
        "runs that differ much are a reason too; the least spread is taken")


def test_a_load_above_the_processors_is_said_before_anything_begins(monkeypatch, tmp_path):
    (tmp_path / "loadavg").write_text("9.50 4.25 2.69 9/256 25305\n")
    monkeypatch.setattr(machine_load, "LOADAVG", tmp_path / "loadavg")
    monkeypatch.setattr(machine_load.os, "cpu_count", lambda: 8)
    assert busy_now().startswith("this machine is busy (load 9.5 on 8 processors)")
    (tmp_path / "loadavg").write_text("0.50 4.25 2.69 9/256 25305\n")
    assert busy_now() is None


def test_a_speed_from_a_busy_machine_is_withheld_and_not_kept(monkeypatch, tmp_path):
    from quantkit.evaluation.speed import process
    from quantkit.evaluation.speed.results import PrefillSpeed, SpeedSweep, Spread, SweepSettings

    ten = Spread(median=10, low=9, high=11)
    sweep = SpeedSweep(prefill=(PrefillSpeed(tokens=8, tok_s=ten, decode_tok_s=ten, runs=3),),
                       settings=SweepSettings(), load=BUSY, load_s=1.0)
    monkeypatch.setattr(process, "measure_sweep", lambda *_, **__: sweep)
    monkeypatch.setattr(jobs, "busy_reason", busy_reason)
    result = jobs.run_job(jobs.SpeedJob(ModelRef("m"), None, (1,), SweepSettings(), 1))
    kept = result.data.sweep
    assert kept.prefill == () and "60%" in kept.withheld and kept.load_s == 1.0
    store = MeasurementStore(tmp_path)
    store.put({"a": 1}, result)
    assert store.get({"a": 1}, jobs.SpeedData) is None and not result.lasting
    store.put({"a": 1}, dataclasses.replace(result, lasting=True))
    assert store.get({"a": 1}, jobs.SpeedData).data == result.data
