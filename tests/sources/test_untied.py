"""Heads that are the embedding or aren't: as a recipe wants it, and as the tensors say."""

from __future__ import annotations

import json

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file, save_file

from quantkit.export.gguf.export import export_gguf
from quantkit.quantization.run import quantize
from quantkit.runtime.loader import load
from quantkit.runtime.verify import verify
from quantkit.sources import causal_lm
from quantkit.sources.causal_lm import EMBEDDING, HEAD, ResolvedHeadSource
from quantkit.sources.open import open_source
from quantkit.support.errors import QuantkitError
from quantkit.testing import tiny_model

RECIPE = """name: head8
rules:
  - match: lm_head
    method: rtn
    spec: {bits: 8, granularity: {strategy: channel}}
  - match: "*"
    method: rtn
    spec: {bits: 4, granularity: {strategy: group, size: 32}}
"""


@pytest.fixture
def tied(tmp_path):
    return tiny_model(tmp_path / "tied")


def test_the_head_is_the_embedding_by_another_name(tied):
    source = ResolvedHeadSource(open_source(str(tied)), tied=False)
    infos = source.tensors()
    assert source.config()["tie_word_embeddings"] is False and infos[HEAD].name == HEAD
    assert infos[HEAD].shape == infos[EMBEDDING].shape
    assert torch.equal(source.tensor(HEAD), source.tensor(EMBEDDING))
    assert source.identity() == open_source(str(tied)).identity() and "tokenizer.json" in source.side_files()
    source.close()


def test_a_recipe_that_names_the_head_unties_it(tied, tmp_path):
    recipe = tmp_path / "head8.yaml"
    recipe.write_text(RECIPE)
    out = quantize(str(tied), str(recipe), tmp_path / "OUT").out
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    stored = load_file(out / "model.safetensors")
    assert {"lm_head.weight_packed", "lm_head.weight_scale", EMBEDDING} <= set(stored)
    loaded, plain = load(str(out)), load(str(tied), dtype="float32")
    assert loaded.fallback_reason is None and loaded.manifest.layers[-1].name == "lm_head"
    ids = torch.arange(4, 24)[None]
    far = (loaded.model(ids) - plain.model(ids)).norm() / plain.model(ids).norm()
    assert 0 < far < 0.3


def test_other_recipes_leave_it_tied(tied, tmp_path):
    out = quantize(str(tied), "int8", tmp_path / "OUT").out
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True


def test_a_model_without_an_embedding_is_still_refused_by_the_plan(tied, tmp_path):
    (tied / "model.safetensors").unlink()
    save_file({"model.norm.weight": torch.ones(8)}, tied / "model.safetensors")
    recipe = tmp_path / "head8.yaml"
    recipe.write_text(RECIPE)
    with pytest.raises(QuantkitError, match="doesn't hold the model"):
        quantize(str(tied), str(recipe), tmp_path / "OUT")


@pytest.fixture
def trained_head(tmp_path):
    """A model whose head isn't its embedding, and a folder with its tensors that says that it is."""
    plain = tiny_model(tmp_path / "plain", "qwen2", tie_word_embeddings=False)
    says = tiny_model(tmp_path / "says", "qwen2", tie_word_embeddings=True)
    save_file(load_file(plain / "model.safetensors"), says / "model.safetensors")
    return plain, says


def logits(uri):
    return load(str(uri)).model(torch.arange(4, 24)[None])


@pytest.mark.parametrize("said", [True, None])
def test_a_head_of_other_values_is_the_head(trained_head, said):
    plain, says = trained_head
    config = json.loads((says / "config.json").read_text()) | {"tie_word_embeddings": said}
    (says / "config.json").write_text(json.dumps(config))
    source = open_source(str(says))
    assert source.config()["tie_word_embeddings"] is False and HEAD in source.tensors()
    assert torch.equal(logits(says), logits(plain))


def test_it_stays_one_in_checkpoints_and_exports(trained_head, tmp_path):
    plain, says = trained_head
    out = quantize(str(says), "int8", tmp_path / "out").out
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    same = quantize(str(plain), "int8", tmp_path / "same").out
    assert verify(out).ok and torch.equal(logits(out), logits(same))
    file = tmp_path / "x.gguf"
    export_gguf(str(out), file)
    assert "output.weight" in {tensor.name for tensor in GGUFReader(file).tensors}
    assert open_source(str(file)).config()["tie_word_embeddings"] is False


def test_it_stays_one_in_other_tools_checkpoints(trained_head, tmp_path):
    """Whose config says that the head is the embedding, as the tool copied it."""
    plain, _ = trained_head
    out = quantize(str(plain), "w8a8", tmp_path / "out").out  # which leaves the head plain
    wanted = logits(out)
    (out / "quantkit.json").unlink()
    config = json.loads((out / "config.json").read_text()) | {"tie_word_embeddings": True}
    (out / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits(out), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_head_of_equal_values_is_the_embedding(tied, dtype):
    stored = load_file(tied / "model.safetensors")
    before = logits(tied)
    save_file({**stored, HEAD: stored[EMBEDDING].to(dtype).clone()}, tied / "model.safetensors")
    source = open_source(str(tied))
    assert source.config()["tie_word_embeddings"] is True and HEAD not in source.tensors()
    assert torch.equal(logits(tied), before)


def test_large_heads_are_compared_piece_by_piece(tied, monkeypatch):
    """What differs in the last value only, is another."""
    monkeypatch.setattr(causal_lm, "_CHUNK", 1000)
    stored = load_file(tied / "model.safetensors")
    head = stored[EMBEDDING].clone()
    head[-1, -1] += 1
    save_file({**stored, HEAD: head}, tied / "model.safetensors")
    assert open_source(str(tied)).config()["tie_word_embeddings"] is False
