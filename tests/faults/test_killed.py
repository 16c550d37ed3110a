"""Killed at any instant and run again, a run ends with the same bytes, and redoes no finished unit."""

from __future__ import annotations

import random

import pytest

from quantkit.checkpoint import durable
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.support.errors import CheckpointError


def again(run, out, reference, contents):
    """Run again after a fault; only where the run was over but for its empty folder, OUT isn't its own."""
    over = out.exists() and not (out.with_name("out.partial") / "state.json").exists()
    try:
        run(out)
        assert not over
    except CheckpointError as error:
        assert over and "already exists" in str(error)
    assert contents(out) == reference
    assert not out.with_name("out.partial").exists()


@pytest.fixture
def whole_or_absent(nothing_loads):
    def check(out, reference, contents):
        if out.exists():
            assert contents(out) == reference
        nothing_loads(out, reference)

    return check


def test_there_are_points_before_all_that_matters(steps):
    text = "\n".join(steps)
    for what in ("create state.json", "rename part-model.layers.1.safetensors", "rename quantkit.json",
                 "publish the checkpoint", "forget the run", "remove the folder"):
        assert what in text
    assert len(steps) > 50


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_every_point(run, steps, tmp_path, at_step, in_child, kill, reference, contents,
                               monkeypatch, whole_or_absent, every):
    for number, what in [*enumerate(steps)][::every]:
        out = tmp_path / str(number) / "out"
        at_step(number, kill)
        assert in_child(lambda out=out: run(out) and 0) == -9, what
        monkeypatch.setattr(durable, "step", lambda what: None)
        whole_or_absent(out, reference, contents)
        finished = {f.stem.removeprefix("part-") for f in out.with_name("out.partial").glob("part-*.json")}
        again(run, out, reference, contents)
        assert not finished & set(run.made), f"{what}: a finished unit was made again"


@pytest.mark.parametrize("trials", [4, pytest.param(15, marks=pytest.mark.slow)])
def test_killed_several_times_in_a_row(run, steps, tmp_path, at_step, in_child, kill, reference, contents,
                                       monkeypatch, whole_or_absent, trials):
    chance = random.Random(0)
    for trial in range(trials):
        out = tmp_path / str(trial) / "out"
        for _ in range(4):
            at_step(chance.randrange(len(steps)), kill)
            in_child(lambda out=out: run(out) and 0)
            whole_or_absent(out, reference, contents)
        monkeypatch.setattr(durable, "step", lambda what: None)
        again(run, out, reference, contents)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_interrupted_at_every_point(run, steps, tmp_path, at_step, reference, contents, monkeypatch, error,
                                    whole_or_absent):
    def interrupt():
        raise error

    for number in range(len(steps)):
        out = tmp_path / str(number) / "out"
        at_step(number, interrupt)
        with pytest.raises(error):
            run(out)
        monkeypatch.setattr(durable, "step", lambda what: None)
        whole_or_absent(out, reference, contents)
        again(run, out, reference, contents)


def test_stopped_after_publishing_the_next_run_only_cleans_up(run, steps, tmp_path, at_step, reference,
                                                              contents, in_child, kill, monkeypatch):
    first, last = steps.index("publish the checkpoint") + 1, steps.index("forget the run")
    assert last - first > 5
    for number in range(first, last + 1):
        out = tmp_path / str(number) / "out"
        at_step(number, kill)
        assert in_child(lambda out=out: run(out) and 0) == -9
        monkeypatch.setattr(durable, "step", lambda what: None)
        assert out.exists() and out.with_name("out.partial").exists()
        assert run(out) == out and run.made == [], steps[number]
        assert contents(out) == reference and [p.name for p in out.parent.iterdir()] == ["out"]


def test_stopped_while_it_is_abandoned_a_run_goes_on(run, tmp_path, at_step, in_child, kill, reference,
                                                     contents, monkeypatch):
    def abandoned(out):
        with CheckpointWriter(out, {"run": 1}) as writer:
            for unit, (tensors, rows) in run.units.items():
                writer.put(unit, tensors, rows)
            writer.abandon()

    seen: list[str] = []
    monkeypatch.setattr(durable, "step", seen.append)
    abandoned(tmp_path / "out")
    assert not list(tmp_path.iterdir())
    for number in range(seen.index("remove part-model.layers.0.json"), len(seen)):
        out = tmp_path / str(number) / "out"
        at_step(number, kill)
        assert in_child(lambda out=out: abandoned(out)) == -9
        monkeypatch.setattr(durable, "step", lambda what: None)
        again(run, out, reference, contents)


def test_a_part_torn_by_a_power_cut_is_made_again(run, steps, tmp_path, at_step, in_child, kill, reference,
                                                  contents, monkeypatch):
    out = tmp_path / "out"
    at_step(steps.index("create part-model.layers.2.safetensors"), kill)
    in_child(lambda: run(out) and 0)
    monkeypatch.setattr(durable, "step", lambda what: None)
    part = tmp_path / "out.partial" / "part-model.layers.0.safetensors"
    part.write_bytes(part.read_bytes()[:-100])
    run(out)
    assert run.made == ["model.layers.0", "model.layers.2"]
    assert contents(out) == reference
