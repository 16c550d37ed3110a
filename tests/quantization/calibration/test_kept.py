"""Gradients are found once for a model and a text; what is kept badly is found again."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from quantkit.plugins.manager import current
from quantkit.quantization.calibration import importance
from quantkit.quantization.recipe import TransformSpec
from quantkit.sources.open import open_source
from quantkit.testing import tiny_model
from tests.helpers.halved import HalvedPlugin

CPU = torch.device("cpu")
TOKENS = torch.arange(12).view(3, 4)
WANTED = ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def find(tiny, tmp_path, monkeypatch):
    """``find(…)``: whether the model was walked through for it."""
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(importance, "LEAST_GRADIENTS", 1)
    made = {name: torch.rand(12, generator=torch.Generator().manual_seed(i)) for i, name in enumerate(WANTED)}

    def ask(tokens=TOKENS, seed=0, wanted=WANTED, transforms=(), uri=tiny):
        walked = []
        source = open_source(str(uri))
        try:
            found = importance.gradients(
                source, [TransformSpec(name=one) for one in transforms], tokens, seed, wanted, CPU,
                lambda: (walked.append(1), {name: made[name] for name in wanted})[1])
        finally:
            source.close()
        assert list(found) == list(wanted) and all(torch.equal(found[name], made[name]) for name in wanted)
        return bool(walked)

    ask.folder = tmp_path / "cache" / "gradients"
    ask.files = lambda: sorted(ask.folder.glob("*.safetensors"))
    return ask


@pytest.fixture
def halved():
    """``halved`` is registered, for this test alone."""
    current.cache_clear()
    current().add(HalvedPlugin(), "dist-halved", version="1")
    yield
    current.cache_clear()


def test_once_for_a_model_and_a_text(find):
    assert [find(), find(), find(wanted=WANTED[::-1])] == [True, False, False]
    assert len(find.files()) == 1


@pytest.mark.parametrize("other", [
    {"tokens": TOKENS + 1}, {"tokens": TOKENS.view(4, 3)}, {"seed": 1}, {"wanted": WANTED[:1]},
    {"transforms": ["halved"]}])
def test_again_for_another(find, halved, other):
    assert find() and find(**other) and not find(**other) and not find()


def test_a_transform_that_changes_layers_only_changes_no_gradient(find):
    assert find() and not find(transforms=["awq"])


def test_another_model_of_the_same_name(find, tiny, tmp_path):
    other = tmp_path / tiny.name
    other.mkdir()
    for file in tiny.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    assert find() and not find(uri=other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    assert find(uri=other) and not find()


@pytest.mark.parametrize("damage", [
    lambda file: file.write_bytes(b""), lambda file: file.write_bytes(file.read_bytes()[:-8]),
    lambda file: file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1])),
    lambda file: save_file({name: torch.rand(12) for name in WANTED}, file),
    lambda file: file.with_suffix(importance.HASH).unlink(),
    lambda file: file.with_suffix(importance.HASH).write_bytes(b"\xff")])
def test_what_is_damaged_is_found_again(find, damage):
    find()
    damage(find.files()[0])
    assert find() and not find()
    assert [file.suffix for file in sorted(find.folder.iterdir())] == [".safetensors", importance.HASH]


def test_a_full_disk_is_no_error(find, monkeypatch):
    def full(*given):
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(importance, "save_file", full)
    assert find() and find() and not list(find.folder.iterdir())


def test_what_a_killed_run_has_left_is_removed_a_day_later(find):
    find()
    old, new = (find.folder / f"{name}{importance.PART}" for name in ("old", "new"))
    for folder in (old, new):
        folder.mkdir()
        (folder / "x.safetensors").write_bytes(b"x")
    os.utime(old, (0, 0))
    find(seed=1)
    assert new.exists() and not old.exists()


def test_few_numbers_are_not_kept(find, monkeypatch):
    monkeypatch.setattr(importance, "LEAST_GRADIENTS", 25)
    assert find() and find() and not find.files()


def test_the_newest_are_kept(find, monkeypatch):
    monkeypatch.setattr(importance, "GRADIENT_FILES", 3)
    for seed in range(5):
        assert find(seed=seed)
    assert len(find.files()) == 3 and not find(seed=4) and find(seed=0)


def test_a_folder_that_cannot_be_written_is_no_error(find, tmp_path):
    (tmp_path / "cache").write_text("a file")
    assert find() and find()
