"""Heads' published files: what is read of them, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.quantization.run import quantize
from quantkit.runtime.drafting.eagle3 import Eagle3Drafter
from quantkit.runtime.drafting.mtp import MtpDrafter
from quantkit.runtime.loader import load
from quantkit.support.errors import QuantkitError, UsageError
from quantkit.testing import tiny_model
from tests.helpers.draft_heads import eagle3_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("heads") / "model", "llama", dtype="float32",
                      num_hidden_layers=7, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def loaded(folder):
    return load(str(folder), dtype="float32")


@pytest.fixture
def drafter(loaded, tmp_path):
    """An EAGLE-3 head whose files a test changes."""
    eagle3_files(tmp_path / "files", loaded.config)
    return Eagle3Drafter(checkpoint=str(tmp_path / "files"))


def rewrite(drafter, **keys):
    """Change keys of its ``config.json``; ``None`` takes one out."""
    path = Path(drafter.checkpoint) / "config.json"
    config = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return config


def test_where_published_configs_name_the_layers(drafter, loaded):
    """As in speculators' the inputs, as in SpecForge's the outputs."""
    name = "eagle_aux_hidden_state_layer_ids"
    config = rewrite(drafter)
    for keys in ({name: [1, 3, 5]}, {"eagle_config": {name: [0, 2, 4], "use_aux_hidden_state": True}}):
        rewrite(drafter, **{name: None, "eagle_config": None} | keys)
        assert drafter.start(loaded).layers == (1, 3, 5)
    layer = {key: config[key] for key in config if key not in ("draft_vocab_size", "norm_before_residual")}
    (Path(drafter.checkpoint) / "config.json").write_text(json.dumps({
        "architectures": ["Eagle3DraftModel"], "auto_map": {}, "draft_vocab_size": 100, "dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": None, "embed_requires_grad": False,
        "has_no_defaults_at_init": False, "norm_before_fc": False, "norm_before_residual": True,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x/y"}},
        "speculators_model_type": "eagle3", "speculators_version": "0.3.0", "target_hidden_size": None,
        "tie_word_embeddings": False, "transformer_layer_config": layer}))
    assert drafter.start(loaded).layers == (2, 3, 4)


@pytest.mark.parametrize(("keys", "message"), [
    ({"eagle_aux_hidden_state_layer_ids": [2, 3, 40]}, "hidden states of the layers 2, 3, 40"),
    ({"eagle_aux_hidden_state_layer_ids": 3}, "must be a list of layers' numbers"),
    ({"eagle_aux_hidden_state_layer_ids": ["a", 2.7]}, "must be a list of layers' numbers"),
    ({"eagle_config": "x"}, "must be an object"), ({"transformer_layer_config": [1]}, "must be an object"),
    ({"draft_vocab_size": [1]}, "must be an integer"), ({"norm_before_residual": "no"}, "must be true or"),
    ({"norm_before_fc": True}, "only False is implemented"), ({"bias": True}, "only False is implemented"),
    ({"num_hidden_layers": 2}, "only heads of one layer"), ({"target_hidden_size": 128}, "only 64 is"),
    ({"mixer": "mamba"}, "no such key is implemented"),
    ({"draft_vocab_size": 90}, r"lm_head.weight has shape \[100, 64\]"),
    ({"hidden_size": 128}, "hidden size is 128, the model's 64")])
def test_configs_of_heads_are_read_strictly(drafter, loaded, keys, message):
    rewrite(drafter, **keys)
    with pytest.raises(QuantkitError) as refused:
        drafter.start(loaded)
    assert re.search(message, f"{refused.value.what}: {refused.value.why}")


@pytest.mark.parametrize(("name", "tensor", "message"), [
    ("fc.weight", torch.zeros(64, 192, dtype=torch.int64), "floating-point numbers of 2 dimensions"),
    ("fc.weight", torch.zeros(64), "floating-point numbers of 2 dimensions"),
    ("norm.weight", torch.zeros(64, 1), "floating-point numbers of 1 dimensions"),
    ("d2t", torch.zeros(100), "must be whole numbers"), ("d2t", torch.full((100,), 290), "it drafts token"),
    ("d2t", torch.full((100,), -5), "it drafts token -5"), ("fc.bias", torch.zeros(64), "that nothing uses"),
    ("midlayer.hidden_norm.weight", None, "lacks the tensor 'midlayer.hidden_norm.weight'")])
def test_tensors_of_heads_are_read_strictly(drafter, loaded, name, tensor, message):
    path = Path(drafter.checkpoint) / "model.safetensors"
    files = load_file(path)
    if tensor is None:
        del files[name]
    else:
        files[name] = tensor
    save_file(files, path)
    with pytest.raises(QuantkitError) as refused:
        drafter.start(loaded)
    assert message in f"{refused.value.what}: {refused.value.why}"


def test_what_holds_no_head_is_refused(folder, loaded, drafter, tmp_path):
    quantize(str(folder), "int8", tmp_path / "int8")
    for other, match in ((MtpDrafter(checkpoint=str(folder)), "has no head for further tokens"),
                           (MtpDrafter(checkpoint=str(tmp_path / "int8")), "holds no head"),
                           (Eagle3Drafter(checkpoint=str(tmp_path / "int8")), "holds no head")):
        with pytest.raises(UsageError, match=match):
            other.start(loaded)
    experts = load(str(tiny_model(tmp_path / "moe", "qwen3_moe")))
    with pytest.raises(UsageError, match="eagle3 can't draft for"):
        drafter.start(experts)
