"""Checkpoints that a comparison makes, or finds there."""

from __future__ import annotations

import shutil

import pytest

from quantkit.evaluation.sweep import checkpoints
from quantkit.evaluation.sweep.checkpoints import folders_of, made
from quantkit.quantization.recipe import CalibrationSpec
from quantkit.support.errors import CheckpointError, UsageError


@pytest.fixture
def folder(tiny, tmp_path):
    """The tiny model by recipe int8."""
    assert made(str(tiny), "int8", tmp_path / "int8")
    return tmp_path / "int8"


def test_what_is_there_is_taken(tiny, folder):
    told = []
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert not made(str(tiny), "int8", folder, begins=told.append)
    assert told == [True] and (folder / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("part", ["model", "recipe", "version"])
def test_a_folder_of_something_else_is_refused_with_what_differs(tiny, folder, tmp_path, monkeypatch, part):
    other = tmp_path / "other"
    shutil.copytree(tiny, other)
    if part == "model":
        data = bytearray((other / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (other / "model.safetensors").write_bytes(data)
    if part == "version":
        monkeypatch.setattr(checkpoints, "__version__", "99")
    with pytest.raises(CheckpointError, match="is not what") as caught:
        made(str(other if part == "model" else tiny), "nf4" if part == "recipe" else "int8", folder)
    assert part in caught.value.why and "--out" in caught.value.next and str(folder) in caught.value.next


def test_another_calibration_makes_another_checkpoint(tiny, tmp_path):
    few, more = (CalibrationSpec(windows=samples, window=16) for samples in (2, 3))
    assert made(str(tiny), "int4", tmp_path / "int4", calibration=few)
    assert not made(str(tiny), "int4", tmp_path / "int4", calibration=few)
    with pytest.raises(CheckpointError, match="is not what"):
        made(str(tiny), "int4", tmp_path / "int4", calibration=more)


def test_a_damaged_folder_is_refused(tiny, folder):
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(CheckpointError, match="damaged") as caught:
        made(str(tiny), "int8", folder)
    assert "model.safetensors" in caught.value.why


def test_folders_by_name(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("name: ../../elsewhere\ndescription: Mine.\nrules: [{match: '*', method: null}]\n")
    assert folders_of(["int8", str(recipe)], tmp_path) == {
        "int8": tmp_path / "int8", str(recipe): tmp_path / "mine"}, "a file's content names no path"
    with pytest.raises(UsageError, match="twice"):
        folders_of(["int8", "int8"], tmp_path)
    with pytest.raises(UsageError, match="has its name"):
        folders_of([str(recipe), str(recipe.rename(tmp_path / "int8.yaml")), "int8"][1:], tmp_path)
