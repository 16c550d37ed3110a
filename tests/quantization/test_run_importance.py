"""Runs in which tokens have an importance: found once, kept over a stop, and only where it is asked for."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.checkpoint import durable
from quantkit.checkpoint.reader import Checkpoint
from quantkit.quantization import run as module
from quantkit.quantization.planning.plan import make_plan
from quantkit.quantization.recipe import load_recipe
from quantkit.quantization.run import quantize
from quantkit.sources.open import open_source
from quantkit.support.errors import QuantkitError, Stopped
from quantkit.testing import tiny_model
from tests.helpers.folders import contents

RECIPE = """
calibration: {{windows: 4, window: 32, importance: {importance}}}
rules:
  - {{match: lm_head, optional: true}}
  - match: "*"
    method: gptq
    spec: {{bits: 3, granularity: {{strategy: group, size: 32}}}}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_model(tmp_path_factory.mktemp("models") / "model"))


@pytest.fixture
def recipe(tmp_path):
    def write(kind: str) -> str:
        path = tmp_path / f"{kind}.yaml"
        path.write_text(RECIPE.format(importance=kind))
        return str(path)

    return write


@pytest.fixture
def found(monkeypatch):
    """How often it was worked out."""
    calls, work = [], module.token_gradients
    monkeypatch.setattr(module, "token_gradients", lambda *args: (calls.append(1), work(*args))[1])
    return calls


def test_it_is_worked_out_where_it_is_asked_for_and_changes_the_result(model, recipe, tmp_path, found):
    results = {kind: quantize(model, recipe(kind), tmp_path / kind) for kind in ("equal", "gradient")}
    assert len(found) == 1
    levels = {}
    for kind, result in results.items():
        with Checkpoint.open(result.out) as checkpoint:
            assert checkpoint.manifest.calibration.importance == kind
            assert checkpoint.manifest.recipe["calibration"]["importance"] == kind
            levels[kind] = checkpoint.tensor("model.layers.0.mlp.up_proj.weight_packed")
    assert not torch.equal(levels["equal"], levels["gradient"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("at", range(9))
def test_stopped_anywhere_and_run_again_it_ends_with_the_same_bytes(model, recipe, tmp_path, found,
                                                                    at, stop_at):
    whole = contents(quantize(model, recipe("gradient"), tmp_path / "whole").out)
    found.clear()
    with pytest.raises(Stopped):
        quantize(model, recipe("gradient"), tmp_path / "out", progress=stop_at(at))
    result = quantize(model, recipe("gradient"), tmp_path / "out")
    assert contents(result.out) == whole and not (tmp_path / "out.partial").exists()
    # six events while it is found: at the beginning and after each layer, forward and backward, and the head
    assert len(found) == (2 if 0 < at < 6 else 1)


def test_what_the_walks_left_is_removed_once_they_are_done(model, recipe, tmp_path):
    seen = []

    def watch(event):
        names = sorted(path.stem for path in (tmp_path / "out.partial").glob("part-work-*.json"))
        seen.append([name.removeprefix("part-work-").removeprefix("walks.") for name in names])

    quantize(model, recipe("gradient"), tmp_path / "out", progress=watch)
    hidden = ["hidden.0", "hidden.1", "hidden.2"]
    assert seen[:6] == [[], hidden[:2], hidden, [*hidden[:2], "slopes.2", "squares.2"],
                        ["hidden.0", "slopes.1", "squares.1", "squares.2"],
                        ["slopes.0", "squares.0", "squares.1", "squares.2"]]
    assert seen[6:] == [["importance"]] * len(seen[6:])
    assert not [path.name for path in (tmp_path / "out").iterdir() if "work" in path.name]


def test_a_disk_that_is_full_says_so(model, recipe, tmp_path, monkeypatch):
    def full(what):
        if what == "write part-work-walks.hidden.1.safetensors":
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(durable, "step", full)
        with pytest.raises(QuantkitError, match=r"walks\.hidden\.1' can't be written") as caught:
            quantize(model, recipe("gradient"), tmp_path / "out")
    assert "same command again" in caught.value.next
    assert "No space left" in caught.value.why and not (tmp_path / "out").exists()
    assert quantize(model, recipe("gradient"), tmp_path / "out").resumed == 0


def test_what_a_killed_run_left_counts_as_room_that_the_next_one_has(model, recipe, tmp_path,
                                                                     monkeypatch, stop_at):
    with pytest.raises(Stopped):
        quantize(model, recipe("gradient"), tmp_path / "out", progress=stop_at(2))
    states = tmp_path / "out.partial" / "states"
    states.mkdir()
    (states / "0").write_bytes(bytes(5_000_000))
    needed = make_plan(load_recipe(recipe("gradient")), open_source(model)).needed_disk_bytes
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=max(0, needed - 5_000_000)))
    quantize(model, recipe("gradient"), tmp_path / "out")
    assert not states.exists()


def test_a_linear_on_which_nothing_depends_is_noted_and_strict_refuses_it(model, recipe, tmp_path):
    dead = tmp_path / "dead"
    dead.mkdir()
    for path in Path(model).iterdir():
        (dead / path.name).write_bytes(path.read_bytes())
    tensors = load_file(dead / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"].zero_()
    save_file(tensors, dead / "model.safetensors", metadata={"format": "pt"})
    result = quantize(str(dead), recipe("gradient"), tmp_path / "out")
    noted = [note for note in result.fallbacks if "count the same" in note]
    assert [note.partition(":")[0].rpartition(".")[2] for note in noted] == ["q_proj", "k_proj", "v_proj"]
    with pytest.raises(QuantkitError, match=r"q_proj: .*count the same"):
        quantize(str(dead), recipe("gradient"), tmp_path / "strict", strict=True)
