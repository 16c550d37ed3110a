"""Killed at a write point and run again, every method in every layout ends with the same bytes."""

from __future__ import annotations

import pytest

from quantkit.checkpoint import durable
from quantkit.plugins import registry


@pytest.fixture
def killed_at(at_step, in_child, kill, monkeypatch, tmp_path, nothing_loads):
    """``killed_at(run, points)``: a process dies at each of them, the next one ends the run."""

    def one(run, points) -> int:
        assert run.reference
        for number in points:
            what, out = run.steps[number], tmp_path / str(number) / "out"
            out.parent.mkdir()
            at_step(number, kill)
            assert in_child(lambda out=out: run(out)) == -9, what
            monkeypatch.setattr(durable, "step", lambda what: None)
            nothing_loads(out, run.reference)
            run.again(out)
        return len(points)

    return one


def test_no_method_and_no_format_is_left_out(every_case):
    assert {case.method for case in every_case} == set(registry("methods"))
    wide = {"gguf-q4_k", "gguf-q5_k", "gguf-q6_k"}  # no layer of the tiny model has 256 inputs, a block
    assert {case.format for case in every_case} == set(registry("formats")) - wide
    assert "hqq" in registry("methods"), "plugins are among them"


@pytest.mark.sampled(4)
def test_killed_at_some_points(case, run_of, killed_at):
    killed_at(run_of(case), run_of(case).points(1 if "calibration" in case.recipe else 2))


@pytest.mark.slow
def test_killed_at_every_point(case, run_of, killed_at, figures):
    run = run_of(case)
    assert run.reference
    points = figures.setdefault("killed at every write point", {})
    points[case.name] = killed_at(run, range(len(run.steps)))


@pytest.mark.slow
def test_shipped_recipes_killed_at_some_points(shipped, run_of, killed_at, figures):
    points = figures.setdefault("shipped recipes, killed at some write points", {})
    points[shipped.name] = killed_at(run_of(shipped), run_of(shipped).points(8))
