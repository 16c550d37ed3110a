from __future__ import annotations

import hashlib
import json
import os

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from quantkit.quantization.run import quantize
from quantkit.runtime.loader import load
from quantkit.sources import local
from quantkit.sources.local import KIND, SIDE_FILES, LocalSource
from quantkit.sources.open import open_source
from quantkit.support.errors import QuantkitError, SourceError
from quantkit.testing import tiny_model

WEIGHTS = save({"a": torch.ones(2, 2)})


@pytest.fixture
def folder(tmp_path, model_folder):
    return model_folder(tmp_path / "m", model__safetensors=WEIGHTS, tokenizer__json="{}", merges__txt="a b\n",
                        notes__txt="mine", modeling_evil__py="open('ran', 'w')")


def refused(path, what: str) -> SourceError:
    with pytest.raises(SourceError, match=what) as caught:
        open_source(str(path))
    assert caught.value.next or caught.value.why
    return caught.value


def test_a_tiny_model(tmp_path):
    tiny_model(tmp_path, seed=3)
    source = open_source(str(tmp_path))
    assert source.config()["model_type"] == "llama" and source.uri == str(tmp_path)
    assert source.tensors()["model.embed_tokens.weight"].shape == (300, 64)
    for name, info in source.tensors().items():
        assert source.tensor(name).shape == info.shape and source.tensor(name).dtype == info.dtype
    assert set(source.side_files()) == {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}


def test_only_known_side_files_are_taken_unchanged(folder):
    assert LocalSource(folder, "m").side_files() == {"tokenizer.json": b"{}", "merges.txt": b"a b\n"}
    for name in SIDE_FILES:
        (folder / name).write_bytes(name.encode())
    assert LocalSource(folder, "m").side_files() == {name: name.encode() for name in SIDE_FILES}


def test_identity_hashes_what_is_read(folder):
    identity = LocalSource(folder, "m").identity()
    assert (identity.kind, identity.uri, identity.revision, identity.pinned) == ("local", "m", None, False)
    assert set(identity.files) == {"config.json", "model.safetensors", "tokenizer.json", "merges.txt"}
    for name, digest in identity.files.items():
        assert digest == hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "model.safetensors").rename(folder / "x.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x.safetensors"}}')
    assert {"x.safetensors", "model.safetensors.index.json"} < set(LocalSource(folder, "m").identity().files)


def test_the_config_is_a_copy(folder):
    source = LocalSource(folder, "m")
    source.config()["hidden_size"] = 3
    source.config()["architectures"].append("x")
    assert source.config()["hidden_size"] == 8 and source.config()["architectures"] == ["LlamaForCausalLM"]
    source.close()
    with pytest.raises(SourceError, match="closed"):
        source.tensor("a")


def test_auto_map_is_data(folder, model_folder, monkeypatch):
    monkeypatch.chdir(folder)
    config = {"model_type": "llama", "auto_map": {"AutoModelForCausalLM": "modeling_evil.Model"}}
    model_folder(folder, config__json=config, __init____py="open('ran', 'w')")
    source = open_source(str(folder))
    source.tensor("a"), source.side_files(), source.identity()
    assert source.config()["auto_map"] == config["auto_map"] and not (folder / "ran").exists()
    assert not any(name.endswith(".py") for name in source.side_files())


def test_what_is_no_model_folder(tmp_path, folder, model_folder):
    refused(tmp_path / "none", "doesn't exist")
    (tmp_path / "e").mkdir()
    refused(tmp_path / "e", "empty")
    (tmp_path / "e" / "readme.md").write_text("x")
    refused(tmp_path / "e", "not a model folder\n.*readme.md")
    (tmp_path / "e" / "a b.gguf").write_text("x")
    assert "'" in (refused(tmp_path / "e", "not a model folder").next or "")
    assert str(folder) in (refused(folder / "model.safetensors", "is a file").next or "")
    (folder / "w.bin").write_text("x")
    assert "safetensors" in (refused(folder / "w.bin", "is a file").next or "")
    for name in ("model.safetensors", "w.bin"):
        (folder / name).unlink()
    refused(folder, "has no weights")
    (folder / "pytorch_model.bin").write_text("x")
    refused(folder, "weights as pickle")
    refused("/" + "a" * 5000, "can't be a path")
    refused("~nobody-at-all/x", "can't be a path")
    refused("./a\0b", "doesn't exist|can't be a path")


@pytest.mark.parametrize("text,what", [
    ("", "not JSON"), ("[]", "list"), ('{"a": 1, "a": 1}', "'a' twice"), ('{"a": NaN}', "not JSON"),
    ("{" + " " * 17 * 2**20 + "}", "larger than"),
])
def test_a_config_that_is_refused(folder, text, what):
    (folder / "config.json").write_text(text)
    error = refused(folder, what)
    assert str(folder) in error.what


def test_a_checkpoint_is_no_source(folder):
    (folder / "config.json").write_text('{"quantization_config": {"bits": 4}}')
    (folder / "model.safetensors").write_bytes(save({"a.qweight": torch.ones(2, 2, dtype=torch.int32)}))
    assert refused(folder, "already quantized").next == f"quantkit inspect {folder}"


PLAIN_WORDS = [{"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}},
               {"quantization_config": {"quant_method": "torchao"}}, {"quantization_config": {}},
               {"quantization": {"bits": None}}, {"quantization": {"group_size": 64, "bits": 4}}]


@pytest.mark.filterwarnings("ignore:.*holds plain weights")
@pytest.mark.parametrize("words", PLAIN_WORDS, ids=str)
def test_plain_weights_are_what_they_are_whatever_the_config_says(tmp_path, words):
    """Generating and quantizing take them as the model without these words."""
    plain, says = tiny_model(tmp_path / "plain"), tiny_model(tmp_path / "says", **words)
    with pytest.warns(UserWarning, match="holds plain weights: quantization"):
        source = open_source(str(says))
    assert source.config() == LocalSource(plain, "m").config()
    ids = torch.arange(4, 12)[None]
    assert torch.equal(load(str(says)).model(ids), load(str(plain)).model(ids))
    made = quantize(str(says), "int8", tmp_path / "out").out
    assert torch.equal(load(str(made)).model(ids),
                       load(str(quantize(str(plain), "int8", tmp_path / "same").out)).model(ids))


@pytest.mark.parametrize(("more", "words", "what"), [
    ({"model.layers.0.self_attn.k_proj.k_scale": torch.ones(1)}, {}, "kv_cache_scheme"),
    ({}, {"kv_cache_scheme": None, "transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
    ({"model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)}, {"kv_cache_scheme": None}, "nothing uses")])
def test_words_that_say_more_than_weights_do_count(tmp_path, more, words, what):
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    scheme = {"quant_method": "compressed-tensors", "format": "float-quantized",
              "config_groups": {"g": group}, "ignore": ["re:.*"],
              "kv_cache_scheme": {"num_bits": 8, "type": "float"}, **words}
    folder = tiny_model(tmp_path / "m", quantization_config=scheme)
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, **more}, folder / "model.safetensors")
    with pytest.raises(QuantkitError, match=what):
        load(str(folder))
    with pytest.raises(SourceError, match="already quantized"):
        open_source(str(folder))


@pytest.mark.parametrize(("words", "what"), [
    ({"quantization_config": {}}, "doesn't say how the model is quantized"),
    ({"quantization": {"bits": None}}, "doesn't say how the model is quantized"),
    ({"quantization": {"bits": None, "group_size": 64}}, "'bits' is missing\nit is null"),
    *(({"quantization_config": {"quant_method": name}}, f"quantized by '{name}', which can't be read")
      for name in ("auto-round", "modelopt", "torchao", "hqq", "exl3", "quark"))], ids=str)
def test_how_a_quantized_model_is_said_to_be(tmp_path, words, what):
    folder = tiny_model(tmp_path / "m", **words)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**weights, name: weights[name].to(torch.int8)}, folder / "model.safetensors")
    with pytest.raises(QuantkitError, match=what) as caught:
        load(str(folder))
    assert caught.value.next


def test_an_adapter_is_called_one(folder):
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "meta-llama/Llama-3.2-1B"}')
    assert open_source(str(folder)), "the model that it was merged into lies beside it"
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    for _ in range(2):
        error = refused(folder, "is an adapter of meta-llama/Llama-3.2-1B, not a model")
        assert "merge_and_unload" in error.next and str(folder) in error.next
        (folder / "config.json").unlink(missing_ok=True)


def test_no_quantization_said_in_words(folder, model_folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": None}))
    open_source(str(folder))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_links_that_leave_are_not_followed(tmp_path, folder, name):
    outside = tmp_path / "outside"
    outside.write_bytes((folder / name).read_bytes())
    (folder / name).unlink()
    (folder / name).symlink_to(outside)
    for ask in (LocalSource.side_files, LocalSource.identity):
        with pytest.raises(SourceError, match=f"{name} is a link that leaves"):
            ask(open_source(str(folder)))


def test_what_is_refused_is_refused_before_anything_is_hashed(folder, monkeypatch):
    monkeypatch.setattr(local, "sha256_file", lambda path: pytest.fail(f"{path} was read"))
    monkeypatch.setattr(local, "MAX_SIDE_FILE", 1)
    with pytest.raises(SourceError, match=r"tokenizer\.json is larger than 1 bytes"):
        open_source(str(folder)).identity()
    (folder / "merges.txt").unlink()
    (folder / "merges.txt").symlink_to("/etc/passwd")
    with pytest.raises(SourceError, match=r"merges\.txt is a link that leaves"):
        open_source(str(folder)).identity()


def test_a_pipe_is_not_waited_for(folder):
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    refused(folder, "missing")


def test_a_revision_makes_no_sense(folder):
    with pytest.raises(SourceError, match="revision") as caught:
        open_source(str(folder), "main")
    assert "hf:owner/name" in (caught.value.next or "")  # a folder may hide the hub's model of its name


def test_matches(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert all(KIND.matches(uri) for uri in ("m", "./nothing", "/nothing", "~/nothing", str(folder)))
    assert not any(KIND.matches(uri) for uri in ("nothing", "owner/name", "smollm2x"))
