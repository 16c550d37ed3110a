"""Data-free recipes on folders whose ``model_type`` nobody here knows."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from quantkit.checkpoint.reader import Checkpoint
from quantkit.models.outline import outline_of_tensors
from quantkit.quantization.run import quantize
from quantkit.sources.base import TensorInfo
from quantkit.sources.open import open_source
from quantkit.support.errors import QuantkitError, SourceError

PREFIX = "model.language_model.layers."
VISION = "model.visual.blocks.0.self_attn.q_proj.weight"


def tensors(layers: int = 2) -> dict[str, torch.Tensor]:
    """A language model beside a tower for images, with a router, experts in one tensor and a convolution."""
    made = {"model.language_model.embed_tokens.weight": torch.randn(300, 128),
            "lm_head.weight": torch.randn(300, 128), VISION: torch.randn(128, 128),
            "mtp.layers.0.self_attn.q_proj.weight": torch.randn(128, 128)}
    for layer in range(layers):
        made |= {f"{PREFIX}{layer}.{name}": torch.randn(*shape) for name, shape in {
            "self_attn.q_proj.weight": (128, 128), "mlp.experts.3.up_proj.weight": (256, 128),
            "mlp.gate.weight": (8, 128), "mlp.experts.gate_up_proj": (8, 256, 128),
            "linear_attn.conv1d.weight": (128, 1, 4), "linear_attn.in_proj_a.weight": (4, 128),
            "input_layernorm.weight": (128,)}.items()}
    return made | {f"{PREFIX}{layers}.self_attn.q_proj.weight": torch.randn(128, 128)}  # beyond: it drafts


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    path = tmp_path / "model"
    path.mkdir()
    save_file({name: tensor.bfloat16() for name, tensor in tensors().items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({
        "model_type": "unheard_of", "architectures": ["UnheardOf"], "vision_config": {},
        "text_config": {"num_hidden_layers": 2, "hidden_size": 128, "tie_word_embeddings": False}}))
    (path / "preprocessor_config.json").write_text('{"size": 224}')
    return path


def test_layers_are_found_and_all_else_is_kept_and_said(folder):
    source = open_source(str(folder))
    outline = outline_of_tensors("m", source.config(), source.tensors())
    assert outline.layer_prefix == PREFIX and outline.num_layers == 2 and not outline.tied
    assert [slot.name for slot in outline.slots] == [
        f"{PREFIX}{layer}.{name}" for layer in range(2)
        for name in ("mlp.experts.3.up_proj", "self_attn.q_proj")]
    assert outline.kept == {
        "experts in one tensor": 2 * 8 * 256 * 128, "a router": 2 * 8 * 128, "a convolution": 2 * 128 * 4,
        "steps of a recurrent state": 2 * 4 * 128,
        "outside of the language model's layers": 2 * 300 * 128 + 3 * 128 * 128}


@pytest.mark.parametrize("recipe", ["int8", "int4-rtn", "fp8", "fp8-block"])
def test_what_is_kept_is_kept_to_the_byte(folder, tmp_path, recipe):
    out = quantize(str(folder), recipe, tmp_path / "out").out
    config = json.loads((out / "config.json").read_text())
    assert config["text_config"] == {"num_hidden_layers": 2, "hidden_size": 128, "tie_word_embeddings": False}
    assert (out / "preprocessor_config.json").read_text() == '{"size": 224}'
    targets = [target for group in config["quantization_config"]["config_groups"].values()
               for target in group["targets"]]
    assert all(target.startswith("re:") for target in targets)  # never a class of modules
    patterns = [re.compile(target.removeprefix("re:")) for target in targets]
    with Checkpoint.open(out) as checkpoint:
        quantized = {row.name for row in checkpoint.layers if row.spec}
        for name, tensor in tensors().items():
            module = name.removesuffix(".weight")
            assert any(pattern.match(module) for pattern in patterns) == (module in quantized), name
            assert (module in quantized) or torch.equal(
                checkpoint.tensor(name), open_source(str(folder)).tensor(name)), name
            assert tensor.dim() == 2 or module not in quantized
        assert checkpoint.manifest.outline.layer_prefix == PREFIX
        assert checkpoint.manifest.outline.quantized == 4 * 128 * 192


def test_patterns_are_also_by_what_vllm_calls_layers(folder, tmp_path):
    """It compares them with its own names, LFM2's short_conv, Granite's mixer."""
    ours = {f"{PREFIX}1.conv.in_proj.weight": torch.randn(256, 128).bfloat16(),
            f"{PREFIX}0.mamba.out_proj.weight": torch.randn(128, 256).bfloat16()}
    save_file({name: tensor.bfloat16() for name, tensor in tensors().items()} | ours,
              folder / "model.safetensors")
    config = json.loads((quantize(str(folder), "int4-rtn", tmp_path / "out").out / "config.json").read_text())
    group, = config["quantization_config"]["config_groups"].values()
    matched = [name for name in ("1.conv.in_proj", "1.short_conv.in_proj", "0.mamba.out_proj",
                                 "0.mixer.out_proj", "0.short_conv.in_proj", "1.convolution.in_proj")
               if any(re.match(target.removeprefix("re:"), PREFIX + name) for target in group["targets"])]
    assert matched == ["1.conv.in_proj", "1.short_conv.in_proj", "0.mamba.out_proj", "0.mixer.out_proj"]


def test_a_layer_that_a_group_does_not_divide_is_kept_and_said(folder, tmp_path):
    odd = {name: tensor.bfloat16() for name, tensor in tensors().items()}
    odd[f"{PREFIX}1.odd.weight"] = torch.randn(128, 72).bfloat16()
    save_file(odd, folder / "model.safetensors")
    result = quantize(str(folder), "int4-rtn", tmp_path / "out")
    row = next(row for row in result.rows if row.name == f"{PREFIX}1.odd")
    assert row.spec is None and "72" in row.notes[0]
    assert "odd" not in json.dumps(json.loads((result.out / "config.json").read_text())[
        "quantization_config"]["config_groups"])


@pytest.mark.parametrize(("recipe", "why"), [
    ("int4", "no language model of type"), ("int4-awq", "it changes or trains"),
    ("int3", "integers of 4 and 8 bits"),
    ("nf4", "read for all Linears of a model or for none"), ("gguf-q8_0", "read for all Linears")])
def test_what_needs_the_mathematics_is_refused(folder, tmp_path, recipe, why):
    with pytest.raises(QuantkitError) as caught:
        quantize(str(folder), recipe, tmp_path / "out")
    assert why in str(caught.value.why) and "int4-rtn" in str(caught.value.next)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_a_stopped_run_goes_on_to_the_same_bytes(folder, resumed_run):
    resumed_run(str(folder), "int8", "layer 1")


def test_weights_that_lie_the_other_way_round_are_refused(folder, tmp_path):
    turned = tensors() | {f"{PREFIX}0.attn.c_attn.weight": torch.randn(128, 384),
                          f"{PREFIX}0.attn.c_attn.bias": torch.randn(384)}
    save_file(turned, folder / "model.safetensors")
    with pytest.raises(SourceError, match=r"c_attn.weight lies as \[in, out\]"):
        quantize(str(folder), "int8", tmp_path / "out")


def infos(*names: str, shape: tuple[int, ...] = (128, 128)) -> dict[str, TensorInfo]:
    return {name: TensorInfo(name, shape, torch.bfloat16) for name in names}


@pytest.mark.parametrize("names", [("weight",), ("a.b.weight", "layers.weight"), ("layers.x.q.weight",)])
def test_a_folder_without_layers_is_refused(names):
    with pytest.raises(SourceError, match="no tensor's name says which layer"):
        outline_of_tensors("m", {"model_type": "x"}, infos(*names))


def test_nothing_to_quantize_is_refused():
    with pytest.raises(SourceError, match="nothing in it can be quantized") as caught:
        outline_of_tensors("m", {"model_type": "x"}, infos("layers.0.gate.weight"))
    assert "a router" in str(caught.value.why)


def test_hostile_names_take_no_time():
    odd = infos("layers.0.q.weight", "a." * 20_000 + "layers.1.q.weight", "layers." * 9_000 + "weight",
                "layers.99999999999999999999.q.weight", "layers.007.q.weight")
    outline = outline_of_tensors("m", {"model_type": "x", "num_hidden_layers": -3,
                                       "hidden_size": "x"}, odd)
    assert [slot.name for slot in outline.slots] == ["layers.0.q"] and outline.num_layers == 1


@pytest.mark.parametrize("model_type", [None, 7, ["llama"], {}])
def test_a_config_that_names_no_family_is_refused(folder, tmp_path, model_type):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    with pytest.raises(SourceError, match="model_type"):
        quantize(str(folder), "int8", tmp_path / "out")


def test_an_architecture_that_is_known_is_as_before(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    with pytest.raises(QuantkitError, match="architectures"):
        quantize(str(folder), "int8", tmp_path / "out")

