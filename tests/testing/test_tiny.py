"""Tiny models are whole, deterministic and loadable by others."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from tokenizers import Tokenizer

from quantkit.models.architecture import parse_config
from quantkit.support.errors import UnsupportedModelError, UsageError
from quantkit.testing import FAMILIES, VOCAB, tiny_model


def digest(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_seed_decides_every_byte(tmp_path, family):
    one, same, other = (digest(tiny_model(tmp_path / str(i), family, seed))
                        for i, seed in enumerate((0, 0, 1)))
    assert one == same
    assert {name for name in one if one[name] != other[name]} == {"model.safetensors"}


def test_any_text_round_trips(tmp_path):
    tokenizer = Tokenizer.from_file(str(tiny_model(tmp_path) / "tokenizer.json"))
    text = "the hen, naïve 漢字 🙂\n\ttab \x00"
    ids = tokenizer.encode(text).ids
    assert ids[0] == 1 and max(ids) < VOCAB == tokenizer.get_vocab_size()
    assert len(ids) < len(text.encode())  # some pairs merge
    assert tokenizer.decode(ids) == text


def test_overrides_reach_the_config(tmp_path):
    folder = tiny_model(tmp_path, "qwen3", hidden_size=128, tie_word_embeddings=False, dtype="float16")
    config = json.loads((folder / "config.json").read_text())
    assert parse_config(config).hidden_size == 128 and config["torch_dtype"] == "float16"


def test_what_cannot_run_is_not_written(tmp_path):
    with pytest.raises(UsageError, match="llama"):
        tiny_model(tmp_path / "a", "lama")
    with pytest.raises(UnsupportedModelError):
        tiny_model(tmp_path / "b", hidden_act="gelu")
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.oracle
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_it(tmp_path, family):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: oracle)")
    folder = tiny_model(tmp_path, family)
    if family == "mimo":  # which transformers has no class for: it is Qwen2's
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(
            config | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}))
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer("the hen").input_ids == ours.encode("the hen").ids
    with torch.no_grad():
        assert model(torch.tensor([[1, 5, 9]])).logits.float().std() > 0.5
