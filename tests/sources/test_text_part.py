"""A model of images and text as a source of its text model, in every spelling of its tensors' names; and a
model that was saved without its head."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.quantization.run import quantize
from quantkit.runtime.loader import load
from quantkit.sources.open import open_source
from quantkit.support.errors import SourceError
from quantkit.testing import tiny_model

SPELLINGS = {"published": ("language_model.model.", "language_model.lm_head.", ""),
             "transformers 5": ("model.language_model.", "lm_head.", "model.")}


@pytest.fixture(params=SPELLINGS)
def wrapped(request, tmp_path):
    """A text model's folder, and the same weights inside a model of images."""
    folder = tiny_model(tmp_path / "text", "gemma3_text", tie_word_embeddings=False)
    outer = tiny_model(tmp_path / "outer", "gemma3_text")
    inner, head, other = SPELLINGS[request.param]
    tensors = {name.replace("model.", inner, 1) if name.startswith("model.") else
               name.replace("lm_head.", head, 1): value
               for name, value in load_file(folder / "model.safetensors").items()}
    save_file({**tensors, f"{other}vision_tower.x.weight": torch.zeros(3),
               f"{other}multi_modal_projector.mm_soft_emb_norm.weight": torch.zeros(3)},
              outer / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    dtype = text.pop("torch_dtype")
    (outer / "config.json").write_text(json.dumps({
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": dtype,
        "text_config": text, "vision_config": {"hidden_size": 3}, "mm_tokens_per_image": 256}))
    return folder, outer


def test_it_is_the_text_model(wrapped):
    folder, outer = wrapped
    plain, inside = open_source(str(folder)), open_source(str(outer))
    assert inside.config() == plain.config()
    assert inside.tensors() == dict(plain.tensors())
    for name in plain.tensors():
        assert torch.equal(inside.tensor(name), plain.tensor(name))
    with pytest.raises(SourceError, match="no tensor 'vision_tower"):
        inside.tensor("vision_tower.x.weight")
    inside.close()


def test_it_is_quantized_into_a_text_model(wrapped, tmp_path):
    _, outer = wrapped
    made = load(str(quantize(str(outer), "int8", tmp_path / "out").out))
    assert made.config.model_type == "gemma3_text"
    ids = torch.arange(5, 25)[None]
    exact, got = load(str(outer)).model(ids).float(), made.model(ids).float()
    assert ((got - exact).norm() / exact.norm()).item() < 0.05


def test_without_a_text_model_inside(wrapped):
    _, outer = wrapped
    config = json.loads((outer / "config.json").read_text())
    del config["text_config"]
    (outer / "config.json").write_text(json.dumps(config))
    with pytest.raises(SourceError, match="has no text_config"):
        open_source(str(outer))


@pytest.fixture
def headless(tmp_path):
    """``headless(**config)``: a model with its usual names, and as embedding models are published."""
    def write(**config):
        plain = tiny_model(tmp_path / "plain", "qwen3", **config)
        bare = tiny_model(tmp_path / "bare", "qwen3", **config)
        save_file({name.removeprefix("model."): tensor for name, tensor in
                   load_file(plain / "model.safetensors").items()}, bare / "model.safetensors")
        return plain, bare

    return write


@pytest.mark.parametrize("classes", [["Qwen3ForCausalLM"], ["Qwen3Model"]])
def test_a_model_that_was_saved_without_its_head(headless, tmp_path, classes):
    plain, bare = headless()
    config = json.loads((bare / "config.json").read_text()) | {"architectures": classes}
    (bare / "config.json").write_text(json.dumps(config))
    ids = torch.arange(5, 25)[None]
    assert torch.equal(load(str(bare)).model(ids), load(str(plain)).model(ids))
    made = quantize(str(bare), "int8", tmp_path / "out").out
    assert "model.norm.weight" in load_file(made / "model.safetensors")
    assert torch.equal(load(str(made)).model(ids),
                       load(str(quantize(str(plain), "int8", tmp_path / "same").out)).model(ids))


def test_neither_a_head_nor_an_embedding_that_is_one(headless):
    plain, bare = headless(tie_word_embeddings=False)
    ids = torch.arange(5, 25)[None]
    assert torch.equal(load(str(bare)).model(ids), load(str(plain)).model(ids))
    tensors = load_file(bare / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, bare / "model.safetensors")
    with pytest.raises(SourceError, match="has no lm_head") as caught:
        open_source(str(bare))
    assert "tie_word_embeddings" in caught.value.next
