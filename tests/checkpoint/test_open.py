"""A name on the hub can be a checkpoint, ours or another tool's."""

from __future__ import annotations

import json
import shutil
import warnings

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects

from quantkit.checkpoint.foreign.checkpoint import ForeignCheckpoint
from quantkit.checkpoint.open import open_checkpoint, open_model
from quantkit.checkpoint.reader import Checkpoint
from quantkit.quantization.run import quantize
from quantkit.runtime.loader import load
from quantkit.support.errors import CheckpointError, SourceError, UsageError
from quantkit.testing import tiny_model

SHA = "0123456789abcdef0123456789abcdef01234567"
IDS = torch.randint(4, 300, (1, 8), generator=torch.Generator().manual_seed(5))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """``owner/name`` is what lies in ``held``; only what is asked for is downloaded."""
    held = tmp_path / "held"
    recipe = tmp_path / "r.yaml"
    recipe.write_text("rules:\n  - {match: '*', method: rtn, format: gptq, "
                      "spec: {bits: 8, granularity: {strategy: channel}}}\n")
    quantize(str(tiny_model(tmp_path / "tiny")), str(recipe), held)

    def download(name, *, revision=None, allow_patterns=None, ignore_patterns=None):
        snapshot = tmp_path / "cache" / "snapshots" / SHA
        snapshot.mkdir(parents=True, exist_ok=True)
        names = [p.name for p in held.iterdir()]
        for file in filter_repo_objects(names, allow_patterns=allow_patterns,
                                        ignore_patterns=ignore_patterns):
            shutil.copy(held / file, snapshot / file)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return held


@pytest.mark.parametrize("ours", [True, False])
def test_it_runs_by_its_name(hub, ours):
    expected = load(str(hub), dtype="float32").model(IDS)
    if not ours:
        (hub / "quantkit.json").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = open_model("owner/name", SHA)
        assert isinstance(found, Checkpoint if ours else ForeignCheckpoint)
        found.close()
        loaded = load("owner/name", revision=SHA, dtype="float32")
    assert torch.equal(loaded.model(IDS), expected)
    assert loaded.label == ("rtn int8 channel sym" if ours else "gptq int8 channel sym")
    if not ours:
        assert ForeignCheckpoint(hub).identity().files.keys() >= {"model.safetensors", "config.json"}


@pytest.mark.parametrize("name", ["~nobody-of-that-name/x", "x" * 5000])
def test_names_that_can_be_no_path(name):
    with pytest.raises(UsageError, match="can't be"):
        open_checkpoint(name)
    with pytest.raises(SourceError):
        open_model(name)


def test_a_quantized_model_of_images_and_text(tiny, tmp_path):
    out = tiny.write(tmp_path / "out", {"match": "lm_head"}, {"match": "*", "method": "rtn", "spec": {
        "bits": 8, "granularity": {"strategy": "channel"}}})
    (out / "quantkit.json").unlink()
    config = json.loads((out / "config.json").read_text())
    inner = {key: value for key, value in config.items() if key != "quantization_config"}
    (out / "config.json").write_text(json.dumps({
        "model_type": "gemma3", "text_config": inner, "quantization_config": config["quantization_config"]}))
    with pytest.raises(CheckpointError, match="of images and text") as caught:
        open_checkpoint(out)
    assert caught.value.next.startswith("get the original model")
