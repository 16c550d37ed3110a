"""A model of images and text as a source of its text model, in every spelling of its tensors' names; and a
model that was saved without its head."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.manifest import Manifest
from quantkit.checkpoint.reader import Checkpoint
from quantkit.quantization.recipe import Recipe, load_recipe
from quantkit.quantization.run import quantize
from quantkit.runtime.loader import load
from quantkit.runtime.verify import verify
from quantkit.sources.open import open_source
from quantkit.support.errors import CheckpointError, QuantkitError, SourceError
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


@pytest.mark.parametrize("recipe", ["int8", "int4-rtn"])
def test_all_of_it_is_in_the_checkpoint(wrapped, recipe, tmp_path):
    folder, outer = wrapped
    out = quantize(str(outer), load_recipe(recipe).model_copy(update={"engine": "vllm"}),
                   tmp_path / "out").out
    original, stored = load_file(outer / "model.safetensors"), load_file(out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    words = config.pop("quantization_config")
    assert config == json.loads((outer / "config.json").read_text())
    patterns = [re.compile(target.removeprefix("re:")) for group in words["config_groups"].values()
                for target in group["targets"]]
    for name, tensor in original.items():
        module = name.removesuffix(".weight")
        quantized = f"{module}.weight_packed" in stored
        assert quantized == any(pattern.match(module) for pattern in patterns), name
        assert quantized or torch.equal(stored[name], tensor), name
    assert not any("lm_head" in name or "vision" in name for name in stored if "packed" in name)
    # and it is run as the text model that it is of
    made, ids = load(str(out)), torch.arange(5, 25)[None]
    assert made.config.model_type == "gemma3_text"
    assert torch.equal(load(str(outer)).model(ids), load(str(folder)).model(ids))
    alone = load(str(quantize(str(folder), load_recipe(recipe).model_copy(update={"engine": "vllm"}),
                              tmp_path / "alone").out))
    assert torch.equal(made.model(ids), alone.model(ids))
    assert all(check.status != "failed" for check in verify(out).checks)


def test_a_head_of_its_own_is_told_to_both(wrapped, tmp_path):
    _, outer = wrapped
    config = json.loads((outer / "config.json").read_text())
    tensors = {name: tensor for name, tensor in load_file(outer / "model.safetensors").items()
               if "lm_head" not in name}
    save_file(tensors, outer / "model.safetensors")
    config["text_config"]["tie_word_embeddings"] = True
    (outer / "config.json").write_text(json.dumps(config))
    rule = {"match": "lm_head", "method": "rtn", "spec": {"bits": 8, "granularity": {"strategy": "channel"}}}
    recipe = Recipe.model_validate({"name": "head", "rules": [rule]})
    out = quantize(str(outer), recipe, tmp_path / "out").out
    made = json.loads((out / "config.json").read_text())
    assert made["tie_word_embeddings"] is made["text_config"]["tie_word_embeddings"] is False
    assert load(str(out)).model(torch.arange(5, 25)[None]).isfinite().all()


def test_a_stopped_run_goes_on_to_the_same_bytes(wrapped, resumed_run):
    made = resumed_run(str(wrapped[1]), "int8", "layer 1")
    assert made.plan.disk_bytes == sum(
        tensor.nbytes for tensor in load_file(made.out / "model.safetensors").values())


@pytest.mark.parametrize(("engine", "recipe", "why"), [
    ("transformers", "nf4", "the tower for images has some")])
def test_a_layout_that_means_all_linears_is_refused(wrapped, engine, recipe, why, tmp_path):
    with pytest.raises(QuantkitError) as caught:
        quantize(str(wrapped[1]), load_recipe(recipe).model_copy(update={"engine": engine}), tmp_path / "out")
    assert why in str(caught.value.why)


@pytest.mark.parametrize("change", [
    {"outer": {"model_type": "gemma3", "prefixes": {"model.": "../x."}}},
    {"outer": {"model_type": "gemma3", "prefixes": {}}}])
def test_names_that_no_model_has_are_refused(wrapped, change, tmp_path):
    out = quantize(str(wrapped[1]), "int8", tmp_path / "out").out
    manifest = json.loads((out / "quantkit.json").read_text())
    with pytest.raises(CheckpointError, match="prefixes"):
        Manifest.from_bytes(json.dumps(manifest | change).encode(), "quantkit.json")


def test_a_config_of_another_model_is_refused(wrapped, tmp_path):
    out = quantize(str(wrapped[1]), "int8", tmp_path / "out").out
    config = json.loads((out / "config.json").read_text()) | {"model_type": "x"}
    with Checkpoint(out, Checkpoint.open(out).manifest, config) as checkpoint, pytest.raises(QuantkitError):
        checkpoint.config()


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
