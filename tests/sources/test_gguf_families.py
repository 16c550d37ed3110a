"""Every family that GGUF has, written as llama.cpp's converter does: the weights, the config, and what
llama.cpp itself computes of the same file."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import GGUFReader

from quantkit.models.architecture import parse_config, tensor_shapes
from quantkit.runtime.loader import load
from quantkit.sources import gguf as module
from quantkit.sources.gguf import GGUFSource
from quantkit.sources.gguf_families import FAMILIES
from quantkit.support.errors import SourceError
from tests.helpers.gguf_models import ARCHITECTURES, write_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.25, 1.5, 2.0, 2.0, 3.0],
        "long_factor": [1.0, 1.5, 2.5, 4.0, 7.0, 12.0]}
PARTIAL = {"partial_rotary_factor": 0.75, "rope_scaling": LONG}
WHOLE = {"tie_word_embeddings": False, "rope_theta": 10387.0, "rope_scaling": {
    "rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 640}}
"""Yarn whose ramp goes from 1.002 to 3.9995: rounded to whole dimensions, as llama.cpp does it, or not."""
CASES = [*((family, {}) for family in ARCHITECTURES if family != "gpt_oss"),
         ("gpt_oss", WHOLE), ("gpt_oss", {**WHOLE, "intermediate_size": 96, "num_hidden_layers": 3,
                                          "num_local_experts": 5, "rope_scaling": {"rope_type": "default"}}),
         ("llama", {"tie_word_embeddings": False, "attention_bias": True}),
         ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.5}}),
         ("llama", {"rope_scaling": YARN}), ("qwen2", {"rope_scaling": YARN}),
         ("qwen3", {"rope_scaling": YARN}), ("mistral", {"head_dim": 32}),
         ("qwen3_moe", {"num_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 96}),
         ("phi3", {**PARTIAL, "original_max_position_embeddings": 512, "max_position_embeddings": 2048}),
         ("phi3", {**PARTIAL, "original_max_position_embeddings": 32, "max_position_embeddings": 1024})]


def named(case) -> str:
    family, overrides = case
    return "-".join([family, *(str(key) for key in overrides)])


@pytest.fixture(params=CASES, ids=named)
def model(request, tmp_path):
    """The file, the config and the weights of which it was made."""
    family, overrides = request.param
    return tmp_path / "m.gguf", *write_model(tmp_path / "m.gguf", family, **overrides)


def test_weights_and_config(model):
    path, config, weights = model
    source = GGUFSource(path, str(path))
    parsed, wanted = parse_config(source.config()), parse_config(config)
    assert replace(parsed, model_type=wanted.model_type) == wanted
    assert {name: info.shape for name, info in source.tensors().items()} == tensor_shapes(parsed)
    assert set(weights) == set(source.tensors())
    for name, weight in weights.items():
        assert torch.equal(source.tensor(name), weight), name


@pytest.mark.oracle
def test_llama_cpp_computes_nearly_the_same_logits(model, llama_cpp):
    path = model[0]
    ours = load(str(path), dtype="float32")
    ids = torch.randint(4, ours.model.config.vocab_size, (72,),
                        generator=torch.Generator().manual_seed(0)).tolist()
    with llama_cpp(path) as session:
        theirs = session.predict(ids, 0).logits
    with torch.no_grad():
        logits = ours.model(torch.tensor([ids[:-1]]))[0].float()
    assert (logits - theirs).abs().max() < 0.01 * theirs.std(), float((logits - theirs).abs().max())
    assert (logits.argmax(-1) == theirs.argmax(-1)).float().mean() > 0.95  # random models have near ties


@pytest.fixture
def mxfp4_file(tmp_path):
    """gpt-oss with experts in MXFP4, and the weights of which it was made."""
    path = tmp_path / "m.gguf"
    return path, write_model(path, "gpt_oss", mxfp4=True, **WHOLE)[1]


def test_experts_in_mxfp4(mxfp4_file):
    path, weights = mxfp4_file
    kinds = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(path).tensors}
    assert {name for name, kind in kinds.items() if kind == "MXFP4"} == {
        f"blk.{layer}.ffn_{part}_exps.weight" for layer in range(2) for part in ("gate", "up", "down")}
    source = GGUFSource(path, "m.gguf")
    for name, weight in weights.items():
        assert torch.equal(source.tensor(name), weight), name


@pytest.mark.oracle
def test_llama_cpp_rounds_the_inputs_of_mxfp4(mxfp4_file, llama_cpp):
    path, _ = mxfp4_file
    ids = torch.randint(4, 300, (72,), generator=torch.Generator().manual_seed(0)).tolist()
    with llama_cpp(path) as session:
        theirs = session.predict(ids, 0).logits.double().log_softmax(-1)
    with torch.no_grad():
        model = load(str(path), dtype="float32").model
        ours = model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
    gaps = (ours.exp() * (ours - theirs)).sum(-1)
    assert gaps.median() < 1e-3, (gaps.median(), gaps.max())  # a token may be sent to another expert


@pytest.mark.oracle
def test_llama_cpp_rounds_the_ends_of_yarn_s_ramp(tmp_path, llama_cpp, monkeypatch):
    """What docs/models.md says of gpt-oss: with the same rounding it would be llama.cpp's model."""
    path = tmp_path / "m.gguf"
    write_model(path, "gpt_oss", tie_word_embeddings=False)  # its ramp ends at 1.56
    ids = torch.randint(4, 300, (72,), generator=torch.Generator().manual_seed(0)).tolist()
    with llama_cpp(path) as session:
        theirs = session.predict(ids, 0).logits
    gaps = {}
    for truncate in (False, True):
        monkeypatch.setitem(FAMILIES, "gpt_oss", replace(FAMILIES["gpt_oss"], truncate=truncate))
        with torch.no_grad():
            ours = load(str(path), dtype="float32").model(torch.tensor([ids[:-1]]))[0].float()
        gaps[truncate] = float((ours - theirs).abs().max() / theirs.std())
    assert gaps[True] < 0.01 and gaps[False] > 0.1, gaps


def test_what_gpt_oss_has_no_place_for(tmp_path):
    path = tmp_path / "m.gguf"
    write_model(path, "gpt_oss", **WHOLE)
    content = path.read_bytes()
    for name, other, words in (
            ("blk.1.attn_sinks.weight", "blk.1.attn_sink2.weight", "attn_sink2"),
            ("blk.1.attn_sinks.weight", "blk.1.attn_sinks_a.bias", "attn_sinks_a"),
            ("blk.1.attn_k.bias", "blk.1.ffn_q.bias\0", "ffn_q"),
            ("blk.0.ffn_up_exps.weight", "blk.0.ffn_up_exps.biases", "ffn_up_exps.biases")):
        assert len(name) == len(other) and content.count(name.encode()) == 1
        path.write_bytes(content.replace(name.encode(), other.encode()))
        with pytest.raises(SourceError, match=words):
            GGUFSource(path, "m.gguf")
    shape = struct.pack("<IQQ", 2, 64, 4)  # of the biases of gates and ups
    place = b"blk.0.ffn_up_exps.bias"
    assert content.count(place + shape) == 1
    path.write_bytes(content.replace(place + shape, place + struct.pack("<IQQ", 2, 128, 2)))
    with pytest.raises(SourceError, match=r"ffn_up_exps\.bias' has shape \[2, 128\]") as caught:
        GGUFSource(path, "m.gguf")
    assert "a row for each of 4 experts" in caught.value.why


@pytest.mark.parametrize("count", [0, 3, 5, 2**31])
def test_experts_that_the_metadata_doesn_t_count(tmp_path, count):
    path = tmp_path / "m.gguf"
    write_model(path, "mixtral")
    content, key = path.read_bytes(), b"llama.expert_count" + struct.pack("<I", 4)
    at = content.index(key) + len(key)
    path.write_bytes(content[:at] + struct.pack("<I", count) + content[at + 4:])
    with pytest.raises(SourceError, match=f"each of {count} experts" if count else "in a llama model"):
        GGUFSource(path, "m.gguf")


def test_experts_are_bounded(tmp_path, monkeypatch):
    write_model(tmp_path / "m.gguf", "mixtral")
    monkeypatch.setattr(module, "_MAX_EXPERTS", 3 * 2 * 4 - 1)
    with pytest.raises(SourceError, match="23 are allowed in all"):
        GGUFSource(tmp_path / "m.gguf", "m.gguf")


def test_an_expert_is_dequantized_alone(tmp_path, monkeypatch):
    write_model(tmp_path / "m.gguf", "mixtral", num_local_experts=8)
    import gguf.quants

    sizes, dequantize = [], gguf.quants.dequantize

    def counted(data, kind):
        sizes.append(data.nbytes)
        return dequantize(data, kind)

    source = GGUFSource(tmp_path / "m.gguf", "m.gguf")
    monkeypatch.setattr(gguf.quants, "dequantize", counted)
    monkeypatch.setattr(module, "_CHUNK", 1024)
    weight = source.tensor("model.layers.1.block_sparse_moe.experts.7.w2.weight")
    assert sum(sizes) == 4 * weight.numel() and isinstance(weight, torch.Tensor)
    assert np.prod(weight.shape) == 64 * 64
