"""Killed at a write point and run again, every method in every layout ends with the same bytes."""

from __future__ import annotations

import itertools
import json
import shutil
import time

import pytest

from quantkit.checkpoint import durable
from quantkit.plugins.manager import registry
from quantkit.quantization.run import quantize
from tests.faults.runs.conftest import Case


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


@pytest.mark.sampled(6)
def test_killed_at_some_points(case, run_of, killed_at):
    killed_at(run_of(case), run_of(case).points(1 if "calibration" in case.recipe else 2))


RECOVERED = {"calibration": {"windows": 4, "window": 16}, "recover": {"name": "distill", "windows": 4},
             "rules": [{"match": "lm_head", "optional": True},
                       {"match": "*", "method": "rtn", "spec": {
                           "bits": 2, "granularity": {"strategy": "group", "size": 32}}}]}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["recovered", "int4-autoround", "int4-datafree"])
def test_long_runs_killed_at_some_points(name, run_of, killed_at):
    """A recovery keeps a state of its own, autoround takes steps, and datafree draws its tokens."""
    run = run_of(Case(name, RECOVERED if name == "recovered" else name))
    assert killed_at(run, run.points(3)) == 3


def test_a_clock_that_jumps_changes_no_byte(run_of, killed_at, tmp_path, monkeypatch):
    """Back a year in the middle of a run, and on by another between a kill and what follows."""
    run = run_of(Case("int4-datafree", "int4-datafree"))
    jumps, now = itertools.cycle((0, -3e7, 3e7)), time.time
    assert run.reference
    monkeypatch.setattr(time, "time", lambda: now() + next(jumps))
    (tmp_path / "here").mkdir()
    run.again(tmp_path / "here" / "out")
    killed_at(run, run.points(1))


def test_the_same_model_in_shards_makes_the_same_bytes(tiny, run_of, tmp_path):
    """But for the record of its files."""
    from safetensors.torch import load_file, save_file

    sharded, tensors = shutil.copytree(tiny, tmp_path / "tiny"), load_file(tiny / "model.safetensors")
    (sharded / "model.safetensors").unlink()
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    where = {name: names[number % 3] for number, name in enumerate(tensors)}
    for name in names:
        save_file({key: tensors[key] for key in where if where[key] == name}, sharded / name,
                  {"format": "pt"})
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    run = run_of(Case("int4-rtn", "int4-rtn"))
    files = run.bytes_of(quantize(str(sharded), "int4-rtn", tmp_path / "out").out)
    differ = {name for name in files if files[name] != run.reference.get(name)}
    assert files.keys() == run.reference.keys() and differ <= {"quantkit.json", "README.md"}


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
