"""What can't be loaded is refused before it is quantized, exported or pushed, and verify says so."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.durable import hash_file
from quantkit.checkpoint.manifest import FileRecord, Manifest
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.export.layouts import export
from quantkit.export.push import push
from quantkit.quantization.budget.amount import parse_budget
from quantkit.quantization.budget.choose import choose
from quantkit.quantization.calibration.runner import LayerRunner
from quantkit.quantization.recipe import load_recipe
from quantkit.quantization.run import quantize
from quantkit.runtime.loader import load
from quantkit.runtime.verify import verify
from quantkit.sources.open import open_source
from quantkit.support.errors import CheckpointError, QuantkitError
from quantkit.testing import tiny_model


def fewer_layers(folder):
    """config.json counts one of the file's two layers."""
    edit(folder, num_hidden_layers=1)


def more_layers(folder):
    edit(folder, num_hidden_layers=3)


def another_shape(folder):
    edit(folder, vocab_size=301)


def an_unknown_dtype(folder):
    edit(folder, torch_dtype="float8_e5m2")


def another_family(folder):
    edit(folder, model_type="qwen3", architectures=["Qwen3ForCausalLM"], head_dim=16)


def an_unknown_key(folder):
    edit(folder, no_such_switch=True)


def no_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


def a_damaged_tokenizer(folder):
    (folder / "tokenizer.json").write_text('{"model": 1}')


def settings_that_are_no_object(folder):
    (folder / "tokenizer_config.json").write_text("[]")


def a_spare_tensor(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.extra.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def integers_that_are_no_weights(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


FAULTS = [fewer_layers, more_layers, another_shape, an_unknown_dtype, another_family, an_unknown_key,
          no_tokenizer, a_damaged_tokenizer, settings_that_are_no_object, a_spare_tensor,
          integers_that_are_no_weights]


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture(scope="module")
def made(plain, tmp_path_factory):
    return quantize(str(plain), "int8", tmp_path_factory.mktemp("made") / "out").out


@pytest.fixture
def copy(tmp_path):
    """``copy(folder, fault)``: the same with that fault."""
    def call(folder, fault):
        shutil.copytree(folder, tmp_path / "copy")
        fault(tmp_path / "copy")
        return tmp_path / "copy"

    return call


@pytest.mark.parametrize("fault", FAULTS)
def test_a_source(plain, copy, tmp_path, monkeypatch, fault):
    model = copy(plain, fault)
    with pytest.raises(QuantkitError) as loading:
        load(str(model))
    for work in (CheckpointWriter, LayerRunner):
        monkeypatch.setattr(work, "__init__", lambda *a, **k: pytest.fail("work began"))
    source = open_source(str(model))
    for attempt in (lambda: quantize(str(model), "int8", tmp_path / "out"),
                    lambda: choose(source, load_recipe("mixed"), parse_budget("4.25bpw"))):
        with pytest.raises(QuantkitError) as refused:
            attempt()
        assert refused.value.what == loading.value.what
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint(made, copy, tmp_path, fault):
    """Its manifest agrees with its files, as if it had been published so."""
    folder = copy(made, fault)
    manifest = Manifest.from_bytes((folder / "quantkit.json").read_bytes())
    there = {name: hash_file(folder / name) for name in manifest.files if (folder / name).exists()}
    files = {name: FileRecord(sha256=digest, bytes=size) for name, (digest, size) in there.items()}
    (folder / "quantkit.json").write_bytes(manifest.model_copy(update={"files": files}).to_bytes())
    with pytest.raises(QuantkitError) as loading:
        load(str(folder))
    failed = {check.name: check.detail for check in verify(folder).failed}
    assert loading.value.what in failed.get("loads", failed.get("structure"))
    with pytest.raises(QuantkitError):
        export(str(folder), "bnb-int8", tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
    with pytest.raises(CheckpointError, match="not pushed"):
        push(folder, "owner/name", dry_run=True)


def test_a_kv_setting_of_a_plugin_that_is_gone(made, copy):
    folder = copy(made, lambda folder: None)
    manifest = Manifest.from_bytes((folder / "quantkit.json").read_bytes())
    changed = manifest.model_copy(update={"recipe": {**manifest.recipe, "kv": "gone(3)"}})
    (folder / "quantkit.json").write_bytes(changed.to_bytes())
    (failed,) = verify(folder).failed
    assert failed.name == "loads" and "'gone'" in failed.detail
