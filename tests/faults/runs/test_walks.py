"""The walks that weigh tokens: killed anywhere, they go on at the layer that they had reached."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time

import pytest

from quantkit.checkpoint import durable
from quantkit.quantization.calibration import importance
from quantkit.quantization.run import quantize
from quantkit.support.errors import CheckpointError
from quantkit.testing import tiny_model

LAYERS = 6
RULES = [{"match": "lm_head", "optional": True},
         {"match": "*", "method": "gptq", "spec": {"bits": 4, "granularity": {"strategy": "channel"}}}]
DONE = re.compile(r"rename part-work-walks\.(hidden|squares)\.\d+\.json")
"""The write point at which a layer's result is nearly there: it is once the next one is reached."""


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("deep") / "deep", num_hidden_layers=LAYERS)


@pytest.fixture
def recipe(text, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "walks.yaml"
    calibration = {"text": str(text), "windows": 6, "window": 16}
    path.write_text(json.dumps({"calibration": calibration, "rules": RULES}))
    return path


@pytest.fixture
def run(deep, recipe, run_by, monkeypatch):
    monkeypatch.setattr(importance, "BACKWARD_TOKENS", 32)  # several batches a layer
    return run_by("walks", lambda out: quantize(str(deep), str(recipe), out))


@pytest.fixture
def made(monkeypatch, tmp_path):
    """``made()``: how many layers the walks have computed, in this process and in those that were killed."""
    tally = tmp_path / "tally"

    class Counted(importance.DecoderLayer):
        def __init__(self, *args):
            super().__init__(*args)
            with tally.open("ab") as file:
                file.write(b"x")

    monkeypatch.setattr(importance, "DecoderLayer", Counted)
    return lambda: tally.stat().st_size if tally.exists() else 0


def walked(steps: list[str]) -> list[int]:
    """The numbers of the write points of the walks."""
    return [number for number, what in enumerate(steps) if "work-walks" in what]


def finished(steps: list[str], number: int) -> int:
    """How many layers the walks have on disk at a write point; the embedding and the head aren't counted."""
    done = [what for what in steps[:number] if DONE.fullmatch(what)]
    return len([what for what in done if "hidden.0." not in what and f"squares.{LAYERS}." not in what])


@pytest.mark.slow
def test_killed_where_the_walks_write(run, made, tmp_path, at_step, in_child, kill, monkeypatch):
    """At some points of each kind of unit; no layer that was finished is computed again."""
    assert run.reference
    chance = random.Random(7)
    points = walked(run.steps)
    assert len(points) > 100
    for number in [*sorted(chance.sample(points, 12)), points[0], points[-1]]:
        killed_there(run, number, tmp_path, at_step, in_child, kill, monkeypatch, made)


@pytest.mark.slow
def test_killed_at_every_write_point_of_the_walks(run, made, tmp_path, at_step, in_child, kill, monkeypatch,
                                                  figures):
    assert run.reference
    points = walked(run.steps)
    for number in points:
        killed_there(run, number, tmp_path, at_step, in_child, kill, monkeypatch, made)
    figures["walks that weigh tokens, killed at every write point"] = len(points)


def killed_there(run, number, tmp_path, at_step, in_child, kill, monkeypatch, made):
    out, what = tmp_path / str(number) / "out", run.steps[number]
    out.parent.mkdir()
    at_step(number, kill)
    assert in_child(lambda: run(out)) == -9, what
    monkeypatch.setattr(durable, "step", lambda what: None)
    before = made()
    run.again(out)
    assert made() - before == 2 * LAYERS - finished(run.steps, number), what


def test_killed_again_and_again_it_arrives(run, made, tmp_path, in_child):
    """Every attempt is killed in its second layer at the latest, and keeps the first."""
    assert run.reference
    before, kills = made(), 0
    chance, out = random.Random(3), tmp_path / "here" / "out"
    out.parent.mkdir()
    while not out.exists():
        count = made()
        if (pid := os.fork()) == 0:
            code = 1
            try:
                run(out)
                code = 0
            finally:
                os._exit(code)
        # until it has begun a second layer, and a little
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if made() >= count + 2:
                time.sleep(chance.uniform(0, 0.005))
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                kills += 1
                break
            time.sleep(0.0005)
    assert kills >= LAYERS // 2 and made() - before <= 2 * LAYERS + kills
    assert run.bytes_of(out) == run.reference


def test_another_run_does_not_take_them_up(run, deep, recipe, tmp_path, at_step, in_child, kill, monkeypatch):
    assert run.reference
    out = tmp_path / "here" / "out"
    out.parent.mkdir()
    at_step(run.steps.index("create part-work-walks.slopes.3.safetensors"), kill)
    assert in_child(lambda: run(out)) == -9
    monkeypatch.setattr(durable, "step", lambda what: None)
    other = tmp_path / "other.yaml"
    other.write_text(recipe.read_text().replace('"windows": 6', '"windows": 6, "seed": 1'))
    with pytest.raises(CheckpointError, match="belongs to another run"):
        quantize(str(deep), str(other), out)
    run.again(out)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("unit", ["hidden.1", "slopes.3", "squares.5", f"squares.{LAYERS}"])
def test_damaged_layers_are_computed_again(run, tmp_path, at_step, in_child, kill, monkeypatch, unit):
    """A power cut may tear what a kill leaves whole."""
    assert run.reference
    out = tmp_path / "here" / "out"
    out.parent.mkdir()
    at_step(run.steps.index("create part-work-walks.slopes.2.safetensors"), kill)
    assert in_child(lambda: run(out)) == -9
    monkeypatch.setattr(durable, "step", lambda what: None)
    part = out.with_name("out.partial") / f"part-work-walks.{unit}.safetensors"
    part.write_bytes(part.read_bytes()[:-8] + b"\0\0\0\0\0\0\0\1")
    run.again(out)
