"""Folders as transformers saves them today: the names on disk are those read, and the logits are the same."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from safetensors import safe_open

from quantkit.models.architecture import parse_config, tensor_shapes
from quantkit.runtime.loader import load
from quantkit.testing import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.oracle
transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: oracle)")

FAMILIES = ["gemma2", "gemma3_text", "mixtral", "phi3", "qwen2_moe", "qwen3_moe"]


def randomize(model):
    """Weights with which logits are far apart."""
    random = torch.Generator().manual_seed(3)
    for value in model.parameters():
        value.data = torch.randn(value.shape, generator=random) * (
            0.2 if value.dim() == 1 else 1.3 * value.shape[-1] ** -0.5)


@pytest.fixture(params=FAMILIES)
def saved(request, tmp_path):
    """A model of transformers' own making, as it was in memory and as ``save_pretrained`` left it."""
    config = json.loads((tiny_model(tmp_path / "config", request.param, dtype="float32") /
                         "config.json").read_text())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        keys = {key: value for key, value in config.items() if key not in ("torch_dtype", "architectures")}
        made = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**keys), attn_implementation="eager",
            dtype=torch.float32).eval()
        randomize(made)
        made.save_pretrained(tmp_path / "saved")
    tiny_tokenizer().save(str(tmp_path / "saved" / "tokenizer.json"))
    return made, tmp_path / "saved"


def test_the_names_on_disk_are_those_that_are_listed(saved):
    _, folder = saved
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
    assert found == tensor_shapes(parse_config(json.loads((folder / "config.json").read_text())))


@torch.no_grad()
def test_it_loads_and_computes_the_same(saved):
    theirs, folder = saved
    ids = torch.randint(0, 300, (2, 30), generator=torch.Generator().manual_seed(4))
    expected = theirs(ids).logits
    assert expected.std() > 0.2, "logits too flat to tell models apart"
    ours = load(str(folder), dtype="float32")
    assert (ours.model(ids) - expected).abs().max() <= 1e-4


@torch.no_grad()
def test_the_text_model_inside_a_model_of_images(tmp_path):
    text = json.loads((tiny_model(tmp_path / "config", "gemma3_text", dtype="float32") /
                       "config.json").read_text())
    del text["architectures"], text["torch_dtype"]
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4,
                                           boi_token_index=7, eoi_token_index=8, image_token_index=9)
        theirs = transformers.Gemma3ForConditionalGeneration._from_config(
            config, attn_implementation="eager", dtype=torch.float32).eval()
        randomize(theirs)
        theirs.save_pretrained(tmp_path / "saved")
    tiny_tokenizer().save(str(tmp_path / "saved" / "tokenizer.json"))
    ids = torch.randint(10, 300, (2, 30), generator=torch.Generator().manual_seed(4))
    ours = load(str(tmp_path / "saved"), dtype="float32")
    assert ours.config.model_type == "gemma3_text"
    expected = theirs(ids).logits
    assert expected.std() > 0.2
    assert (ours.model(ids) - expected).abs().max() <= 1e-4
