"""A tied head that is quantized on its own."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from quantkit.errors import QuantkitError
from quantkit.quantize import quantize
from quantkit.runtime.loader import load
from quantkit.sources.open import open_source
from quantkit.sources.untied import EMBEDDING, HEAD, UntiedSource
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
    source = UntiedSource(open_source(str(tied)))
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
    from safetensors.torch import save_file

    save_file({"model.norm.weight": torch.ones(8)}, tied / "model.safetensors")
    recipe = tmp_path / "head8.yaml"
    recipe.write_text(RECIPE)
    with pytest.raises(QuantkitError, match="doesn't hold the model"):
        quantize(str(tied), str(recipe), tmp_path / "OUT")
