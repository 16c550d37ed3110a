"""Runs in which tokens have an importance: found once, kept over a stop, and only where it is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quantkit import quantize as module
from quantkit.calibrate import importance
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CalibrationError, Stopped
from quantkit.quantize import quantize
from quantkit.testing import tiny_model

RECIPE = """
calibration: {{samples: 4, length: 32, importance: {importance}}}
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
    calls, work = [], module.token_importance
    monkeypatch.setattr(module, "token_importance", lambda *args: (calls.append(1), work(*args))[1])
    return calls


class Interrupt:
    """At the n-th event."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, event) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


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


@pytest.mark.parametrize("at", range(9))
def test_stopped_anywhere_and_run_again_it_ends_with_the_same_bytes(model, recipe, tmp_path, found, at):
    whole = contents(quantize(model, recipe("gradient"), tmp_path / "whole").out)
    found.clear()
    with pytest.raises(Stopped):
        quantize(model, recipe("gradient"), tmp_path / "out", progress=Interrupt(at))
    result = quantize(model, recipe("gradient"), tmp_path / "out")
    assert contents(result.out) == whole and not (tmp_path / "out.partial").exists()
    # five events while it is found: at the beginning and after each layer, forward and backward
    assert len(found) == (2 if 0 < at < 5 else 1)


def test_hidden_states_are_no_part_of_what_is_kept(model, recipe, tmp_path, monkeypatch):
    spill = importance.Spill
    monkeypatch.setattr(importance, "Spill", lambda folder: spill(folder, 0))
    seen = []

    def watch(event):
        seen.append(sorted(path.name for path in (tmp_path / "out.partial").iterdir()))

    quantize(model, recipe("gradient"), tmp_path / "out", progress=watch)
    assert "states" in seen[1] and all("states" not in names for names in seen[5:])
    assert "part-work-importance.safetensors" in seen[5]
    assert not [path.name for path in (tmp_path / "out").iterdir() if "importance" in path.name]


def test_a_disk_that_is_full_says_so(model, recipe, tmp_path, monkeypatch):
    def full(self, key, tensor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(importance.Spill, "put", full)
    with pytest.raises(Exception, match="hidden states can't be kept") as caught:
        quantize(model, recipe("gradient"), tmp_path / "out")
    assert "same command again" in caught.value.next and not (tmp_path / "out").exists()


def test_no_slope_anywhere_names_the_remedy(tmp_path, recipe, model, monkeypatch):
    monkeypatch.setattr(importance, "_head", lambda config, weights, states, seed: [
        torch.zeros_like(x) for x in states])
    with pytest.raises(CalibrationError, match=r"gradient at .* is zero") as caught:
        quantize(model, recipe("gradient"), tmp_path / "out")
    assert caught.value.next == "calibration: {importance: equal}"
