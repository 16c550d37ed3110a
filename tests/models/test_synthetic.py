from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Tokenizer

from quantkit.models import synthetic
from quantkit.models.architecture import parse_config, tensor_shapes
from quantkit.models.synthetic import CONFIGS
from quantkit.sources.open import open_source
from quantkit.support.errors import QuantkitError

PUBLISHED = {"llama-8b": 8_030_261_248, "llama-3.1-8b": 8_030_261_248, "llama-1b": 1_235_814_400,
             "phi3-mini": 3_821_079_552, "phi4-mini": 3_836_021_760, "mixtral-8x7b": 46_702_792_704,
             "qwen3-30b-a3b": 30_532_122_624, "gpt-oss-20b": 20_914_757_184,
             "gpt-oss-120b": 116_829_156_672, "gemma2-2b": 2_614_341_888, "gemma3-1b": 999_885_952}


@pytest.mark.parametrize("name,parameters", [(name, PUBLISHED.get(name)) for name in CONFIGS])
def test_shapes_are_the_real_ones(name, parameters, monkeypatch):
    for maker in ("randn", "empty", "ones"):
        monkeypatch.setattr(torch, maker, lambda *a, **k: pytest.fail("a listing makes no tensor"))
    source = open_source(f"synthetic:{name}")
    infos = source.tensors()
    assert {n: i.shape for n, i in infos.items()} == tensor_shapes(parse_config(source.config()))
    assert {i.dtype for i in infos.values()} == {torch.bfloat16}
    if parameters is not None:  # as published
        assert sum(i.nbytes for i in infos.values()) == 2 * parameters


def test_weights_follow_from_name_and_seed():
    one, again, other = (open_source(f"synthetic:tiny{q}") for q in ("", "?seed=0", "?seed=1"))
    for name in one.tensors():
        assert torch.equal(one.tensor(name), again.tensor(name))
        assert torch.equal(one.tensor(name), other.tensor(name)) is name.endswith("norm.weight")
    a, b = (one.tensor(f"model.layers.{i}.mlp.up_proj.weight") for i in (0, 1))
    assert not torch.equal(a, b)
    state = torch.get_rng_state()
    one.tensor("lm_head.weight")
    assert torch.equal(state, torch.get_rng_state())


def test_fewer_layers_are_the_first_ones():
    whole, one = open_source("synthetic:tiny?seed=3"), open_source("synthetic:tiny?layers=1&seed=3")
    assert (whole.config()["num_hidden_layers"], one.config()["num_hidden_layers"]) == (2, 1)
    assert set(one.tensors()) == {name for name in whole.tensors() if ".layers.1." not in name}
    for name in one.tensors():
        assert torch.equal(one.tensor(name), whole.tensor(name))
    assert one.identity().uri.endswith("?layers=1&seed=3") and CONFIGS["tiny"]["num_hidden_layers"] == 2
    for number in (0, 3):
        with pytest.raises(QuantkitError, match=f"can't have {number} layers"):
            open_source(f"synthetic:tiny?layers={number}")


def test_the_distribution():
    source = open_source("synthetic:tiny")
    assert torch.equal(source.tensor("model.norm.weight"), torch.ones(64, dtype=torch.bfloat16))
    weight = source.tensor("model.embed_tokens.weight").float()
    assert weight.shape == (512, 64)
    assert abs(weight.mean()) < 5e-4 and abs(weight.std() - 0.02) < 5e-4
    assert 0.04 < (weight.abs() > 0.04).float().mean() < 0.051  # two standard deviations


def test_large_tensors_are_made_in_pieces(monkeypatch):
    drawn = []
    real = torch.randn
    monkeypatch.setattr(synthetic, "_CHUNK", 1000)
    monkeypatch.setattr(torch, "randn", lambda shape, **k: drawn.append(shape) or real(shape, **k))
    weight = open_source("synthetic:tiny").tensor("lm_head.weight")
    assert len(drawn) == 33 and sum(s.numel() for s in drawn) == weight.numel() == 32768
    assert weight.view(-1)[-100:].float().std() > 0.01


def test_the_tokenizer_round_trips_and_fits_the_smallest_model():
    source = open_source("synthetic:tiny")
    files = source.side_files()
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    for text in ("hello", "naïve 日本\n\t 🎉", ""):
        ids = tokenizer.encode(text).ids
        assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text
    assert tokenizer.get_vocab_size() == source.config()["vocab_size"]
    config = json.loads(files["tokenizer_config.json"])
    assert [tokenizer.token_to_id(config[k]) for k in ("bos_token", "eos_token")] == [256, 257]
    (letter,) = tokenizer.encode("h").ids
    assert tokenizer.decode([300, letter, 511]) == " 300h 511"  # random weights produce them
    assert max(tokenizer.encode("a 300").ids) < 256


def test_identity_and_config_are_its_own():
    source = open_source("synthetic:tiny?seed=7")
    identity = source.identity()
    assert (identity.kind, identity.uri, identity.revision, identity.pinned) == (
        "synthetic", "synthetic:tiny?seed=7", "seed=7", True)
    open_source("synthetic:llama-1b").config()["rope_scaling"]["factor"] = 3
    assert CONFIGS["llama-1b"]["rope_scaling"]["factor"] == 32.0
    source.close()


@pytest.mark.parametrize("uri,revision", [
    ("synthetic:", None), ("synthetic:llama-9b", None), ("synthetic:tiny?seed=x", None),
    ("synthetic:tiny?seed=-1", None), ("synthetic:tiny?seed=", None), ("synthetic:tiny?sed=1", None),
    ("synthetic:tiny?layers=1&layers=2", None), ("synthetic:tiny?seed=1&", None),
    ("synthetic:tiny?seed=9999999999", None), ("synthetic:tiny?seed=²", None), ("synthetic:tiny", "main"),
])
def test_synthetic_names_that_are_refused(uri, revision):
    with pytest.raises(QuantkitError) as caught:
        open_source(uri, revision)
    assert "synthetic:" in (caught.value.next or "")


def test_an_unknown_tensor():
    with pytest.raises(QuantkitError, match="no tensor 'x'"):
        open_source("synthetic:tiny").tensor("x")
