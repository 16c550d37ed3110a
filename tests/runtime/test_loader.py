"""What is loaded is what the files say, all of it and nothing else."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.reader import Checkpoint
from quantkit.models.architecture import parse_config
from quantkit.models.decoder import CausalLM
from quantkit.models.linear import Weights
from quantkit.ops.stored_weight import QuantizedWeight
from quantkit.plugins.manager import registry
from quantkit.quantization.recipe import CalibrationSpec
from quantkit.quantization.run import quantize
from quantkit.runtime.cpu.program import packed_of
from quantkit.runtime.loader import load
from quantkit.support.errors import CheckpointError, QuantkitError, SourceError, UsageError
from quantkit.testing import tiny_model

IDS = torch.tensor([[5, 80, 81, 200, 7]])


@pytest.fixture(scope="module")
def bf16(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("loader") / "tiny")


@pytest.fixture(scope="module", params=["int8", "int4-sym", "nf4"])
def checkpoint(request, bf16, tmp_path_factory):
    out = tmp_path_factory.mktemp("loader") / request.param
    quantize(str(bf16), request.param, out, calibration=CalibrationSpec(windows=4, window=64))
    return out


def edited(folder, to, change):
    """A copy of a model folder whose tensors went through ``change``."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    weights = load_file(to / "model.safetensors")
    change(weights)
    save_file(weights, to / "model.safetensors")
    return to


@pytest.mark.parametrize(("family", "name"), [
    ("llama", "model.embed_tokens.weight"), ("llama", "lm_head.weight"), ("llama", "model.norm.weight"),
    ("qwen2", "model.layers.1.self_attn.k_proj.bias"),
    ("mixtral", "model.layers.0.block_sparse_moe.gate.weight"),
    ("gpt_oss", "model.layers.1.self_attn.sinks"), ("gpt_oss", "model.layers.0.mlp.experts.down_proj_bias")])
def test_a_tensor_with_nan_is_named(family, name, tmp_path):
    folder = tiny_model(tmp_path / "tiny", family, tie_word_embeddings=False)
    bad = edited(folder, tmp_path / "bad", lambda weights: weights[name].view(-1)[1:2].fill_(float("nan")))
    with pytest.raises(SourceError) as caught:
        load(str(bad))
    where = f"{name!r} of {bad / 'model.safetensors'}"
    assert caught.value.what == f"tensor {where} has values that are not finite"


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_family_runs(family, tied, tmp_path):
    loaded = load(str(tiny_model(tmp_path, family, tie_word_embeddings=tied)))
    assert loaded.config.model_type == family and loaded.label == "bf16" and loaded.manifest is None
    assert loaded.model(IDS).shape == (1, 5, loaded.config.vocab_size)
    assert loaded.bits_per_weight == 16
    file = tmp_path / "model.safetensors"
    assert loaded.weight_bytes == sum(t.nbytes for t in load_file(file).values())
    assert loaded.file_bytes == file.stat().st_size


def test_the_weights_are_the_files(bf16):
    stored = load_file(bf16 / "model.safetensors")
    for name, linear in load(str(bf16), dtype="float32").model.linears().items():
        assert torch.equal(linear(torch.eye(linear.shape[1])).T, stored[f"{name}.weight"].float())


@pytest.mark.parametrize(("asked", "expected", "factor"), [
    ("auto", torch.bfloat16, 1), ("float32", torch.float32, 2), ("float16", torch.float16, 1)])
def test_dtype(bf16, asked, expected, factor):
    loaded = load(str(bf16), dtype=asked)
    assert loaded.dtype == expected and loaded.model(IDS).isfinite().all()
    stored = load_file(bf16 / "model.safetensors")
    assert loaded.weight_bytes == factor * sum(tensor.nbytes for tensor in stored.values())


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_the_models_dtype_in_either_spelling(tmp_path, key):
    folder = tiny_model(tmp_path, dtype="float32")
    config = json.loads((folder / "config.json").read_text())
    del config["torch_dtype"]
    (folder / "config.json").write_text(json.dumps(config | {key: "float16"}))
    assert load(str(folder)).dtype == torch.float16


def test_an_unknown_dtype_is_an_error(tmp_path):
    folder = tiny_model(tmp_path)
    with pytest.raises(UsageError, match="no dtype is called 'bfloat61'") as caught:
        load(str(folder), dtype="bfloat61")
    assert "did you mean 'bfloat16'" in caught.value.why
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "int3"}))
    with pytest.raises(SourceError, match="'int3'"):
        load(str(folder))


@pytest.mark.parametrize("device", ["cdua", "cuda:99", "vulkan", "meta9:"])
def test_a_device_that_isnt_there_is_an_error(bf16, device):
    with pytest.raises(UsageError, match="can't be used"):
        load(str(bf16), device=device)


@pytest.mark.parametrize(("name", "tensor", "said"), [
    ("model.layers.1.mlp.up_proj.weight", None, r"lacks the tensor 'model.layers.1.mlp.up_proj.weight'"),
    ("model.layers.0.self_attn.q_proj.lora_A.weight", torch.zeros(2, 64),
     r"nothing uses: 'model.layers.0.self_attn.q_proj.lora_A.weight'"),
    ("model.norm.weight", torch.ones(32, dtype=torch.bfloat16), r"model\.norm\.weight has shape \[32\]")])
def test_a_tensor_too_few_too_many_or_of_another_shape_is_an_error(bf16, tmp_path, name, tensor, said):
    def change(weights):
        weights[name] = tensor
        if tensor is None:
            del weights[name]

    with pytest.raises(SourceError, match=said):
        load(str(edited(bf16, tmp_path / "m", change)))


def test_what_follows_from_the_config_may_be_there(bf16, tmp_path):
    def change(weights):
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    assert torch.equal(load(str(edited(bf16, tmp_path / "m", change))).model(IDS), load(str(bf16)).model(IDS))


def test_a_checkpoint_computes_what_its_format_says(checkpoint, bf16):
    """The reference: every layer dequantized by its format, in an ordinary float32 model."""
    loaded = load(str(checkpoint), dtype="float32")
    with Checkpoint.open(checkpoint) as opened:
        config = parse_config(opened.config())

        def tensor(name):
            packed = opened.quantized(name.removesuffix(".weight"))
            if packed is None:
                return opened.tensor(name)
            return registry("formats").get(packed.format).dequantize(packed)

        expected = CausalLM(config, Weights(tensor, lambda n: True, torch.float32))(IDS)
    torch.testing.assert_close(loaded.model(IDS), expected, rtol=1e-4, atol=1e-4)
    original = load(str(bf16), dtype="float32").model(IDS)
    assert 0 < (expected - original).norm() / original.norm() < 0.5


def test_a_checkpoint_knows_what_it_is(checkpoint):
    loaded = load(str(checkpoint))
    name = checkpoint.name
    assert loaded.manifest is not None and loaded.uri == str(checkpoint)
    assert {"int8": "rtn int8", "int4-sym": "gptq int4 g", "nf4": "nf4 b64"}[name] in loaded.label
    low, high = {"int8": (8, 9), "int4-sym": (4.1, 5), "nf4": (4.1, 5)}[name]
    assert low < loaded.bits_per_weight < high
    assert loaded.file_bytes == sum(f.stat().st_size for f in checkpoint.glob("*.safetensors"))
    stored = load_file(checkpoint / "model.safetensors")
    assert loaded.weight_bytes <= sum(t.nbytes for t in stored.values()) <= loaded.weight_bytes + 4096
    kernel = {"int8": "cpu-int8", "int4-sym": "cpu-int4", "nf4": "cpu-nf4"}[name]
    assert {packed_of(one).name for one in loaded.model.linears().values()} == {kernel}
    plain = load(str(checkpoint), dtype="float32")
    assert all(isinstance(one.weight, QuantizedWeight) for one in plain.model.linears().values())
    assert loaded.tokenizer.has_chat


def test_a_checkpoint_with_a_tensor_too_many_is_an_error(bf16, tmp_path, monkeypatch):
    out = tmp_path / "out"
    quantize(str(bf16), "int8", out)
    with Checkpoint.open(out) as opened:
        infos = dict(opened.infos)
    infos["model.layers.0.self_attn.q_proj.weight"] = infos["model.norm.weight"]
    monkeypatch.setattr(Checkpoint, "infos", infos)
    with pytest.raises(CheckpointError, match="nothing uses"):
        load(str(out))


def test_a_revision_of_a_folder_is_refused(checkpoint, bf16):
    for folder in (checkpoint, bf16):
        with pytest.raises(QuantkitError, match="--revision v1 makes no sense"):
            load(str(folder), revision="v1")


def test_home_is_understood(bf16, checkpoint, monkeypatch):
    for folder in (bf16, checkpoint):
        monkeypatch.setenv("HOME", str(folder.parent))
        assert load(f"~/{folder.name}").model(IDS).isfinite().all()


def test_no_such_model():
    with pytest.raises(QuantkitError):
        load("./no/such/model")


def test_no_tokenizer(bf16, tmp_path):
    folder = edited(bf16, tmp_path / "m", lambda w: None)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(SourceError, match=r"no tokenizer\.json"):
        load(str(folder))


def test_loading_is_told_in_steps(tmp_path):
    folder = tiny_model(tmp_path, hidden_size=256, intermediate_size=2048, vocab_size=4096)
    events = []
    loaded = load(str(folder), loading=events.append)
    done = [event.done for event in events]
    assert {event.total for event in events} == {loaded.weight_bytes // 2**20} and events[0].unit == "MiB"
    assert done[0] == 0 and done == sorted(done) and done[-1] == events[-1].total
    assert len(set(done)) > 3


def test_the_tokenizer_is_there_before_the_weights(bf16):
    order = []
    loaded = load(str(bf16), loading=lambda event: order.append(event.done), on_tokenizer=order.append)
    assert order[0] is loaded.tokenizer


def test_packing_leaves_torch_its_threads(bf16):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        load(str(bf16))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_damage_is_said_rather_than_what_it_causes(checkpoint, tmp_path, monkeypatch):
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    data = bytearray((tmp_path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(data)

    def fails(*_):
        raise ValueError("built from damage")

    monkeypatch.setattr("quantkit.runtime.loader.build_model", fails)
    with pytest.raises(CheckpointError, match="is damaged"):
        load(str(tmp_path))
