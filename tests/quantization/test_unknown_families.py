"""Data-free recipes on folders whose ``model_type`` nobody here knows."""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from quantkit.checkpoint.reader import Checkpoint
from quantkit.cli.main import main as quantkit
from quantkit.models.outline import outline_of_tensors
from quantkit.ops.packing import dequantize
from quantkit.plugins.manager import registry
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


def test_tables_of_numbers_are_no_weights(folder, tmp_path):
    tables = {f"{PREFIX}0.ids": torch.zeros(512, 2, dtype=torch.int64)}
    save_file(tensors() | tables, folder / "model.safetensors")
    shown = CliRunner().invoke(quantkit, ["inspect", str(folder)])
    assert shown.exit_code == 0 and "a router" in shown.output, shown.output
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize(str(folder), "int8", tmp_path / "out")


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
    ("int3", "integers of 4 and 8 bits"), ("nf4", "which bitsandbytes doesn't quantize"),
    ("gguf-q8_0", "read for all Linears")])
def test_what_needs_the_mathematics_is_refused(folder, tmp_path, recipe, why):
    with pytest.raises(QuantkitError) as caught:
        quantize(str(folder), recipe, tmp_path / "out")
    assert why in str(caught.value.why) and "int4-rtn" in str(caught.value.next)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


CANDIDATES = """
name: mine
candidates:
  - {method: rtn, spec: {bits: 3, granularity: {strategy: group, size: 32}}}
  - {method: rtn, spec: {bits: 4, granularity: {strategy: group, size: 32}}}
  - {method: rtn, spec: {bits: 8, granularity: {strategy: channel}}}
  - {method: null}
"""


def test_a_budget_is_kept_without_the_mathematics(folder, tmp_path):
    """The Linear whose values are far apart loses most by few bits, and gets more."""
    apart = tensors()
    apart[f"{PREFIX}1.self_attn.q_proj.weight"][:, ::32] *= 30
    save_file(apart, folder / "model.safetensors")
    (tmp_path / "mine.yaml").write_text(CANDIDATES)
    args = ["quantize", str(folder), "--recipe", str(tmp_path / "mine.yaml"), "--out", str(tmp_path / "out")]
    shown = CliRunner().invoke(quantkit, [*args, "--budget", "6bpw"])
    assert shown.exit_code == 0 and "KL can't be predicted" in " ".join(shown.output.split()), shown.output
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        bits = {row.name: row.spec.bits for row in checkpoint.layers if row.spec}
        assert checkpoint.bits_per_weight <= 6
        stored = sum(tensor.nbytes for tensor in checkpoint.infos.values())
    assert bits[f"{PREFIX}1.self_attn.q_proj"] == 8 and set(bits.values()) == {4, 8}
    assert "int3" not in shown.output  # for which vLLM has no kernel
    few = CliRunner().invoke(quantkit, [*args[:-1], str(tmp_path / "few"), "--budget", f"{stored - 1}B"])
    assert few.exit_code == 0, few.output
    with Checkpoint.open(tmp_path / "few") as checkpoint:
        assert sum(tensor.nbytes for tensor in checkpoint.infos.values()) < stored
    none = CliRunner().invoke(quantkit, [*args[:-1], str(tmp_path / "none"), "--budget", "2bpw"])
    assert none.exit_code == 2 and "less than any choice takes" in none.output


def test_a_config_with_infinity_is_written_as_transformers_reads_it(folder, tmp_path):
    written = (folder / "config.json").read_text()
    (folder / "config.json").write_text(written[:-1] + ', "time_step_limit": [0.0, Infinity]}')
    config = json.loads((quantize(str(folder), "int8", tmp_path / "out").out / "config.json").read_text())
    assert config["time_step_limit"] == [0.0, {"__float__": "Infinity"}]


def test_a_stopped_run_goes_on_to_the_same_bytes(folder, resumed_run):
    resumed_run(str(folder), "int8", "layer 1")


def in_squares(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in fp8 by squares of 64, and their scales."""
    tiles = weight.reshape(weight.shape[0] // 64, 64, -1, 64)
    scales = tiles.abs().amax((1, 3), keepdim=True) / 448
    return (tiles / scales).reshape(weight.shape).to(torch.float8_e4m3fn), scales[:, 0, :, 0]


def test_a_model_that_is_published_in_fp8_alone(folder, tmp_path):
    """Its weights are those that the file stands for; what stays is in 16 bits."""
    stored, exact = {}, {}
    for name, tensor in tensors().items():
        stored[name] = exact[name] = tensor.bfloat16()
        if tensor.dim() == 2 and min(tensor.shape) >= 128 and "embed" not in name and "lm_head" not in name:
            stored[name], stored[f"{name}_scale_inv"] = in_squares(tensor)
            values = stored[name].float().reshape(tensor.shape[0] // 64, 64, -1, 64)
            exact[name] = (values * stored[f"{name}_scale_inv"][:, None, :, None]).reshape(tensor.shape)
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [64, 64]}}))
    with pytest.warns(UserWarning, match="fine-grained-fp8"):
        out = quantize(str(folder), "int8", tmp_path / "out").out
    with Checkpoint.open(out) as checkpoint:
        assert {row.name for row in checkpoint.layers if row.spec} == {
            f"{PREFIX}{layer}.{name}" for layer in range(2)
            for name in ("mlp.experts.3.up_proj", "self_attn.q_proj")}
        assert torch.equal(checkpoint.tensor(VISION), exact[VISION].bfloat16())
        name = f"{PREFIX}1.self_attn.q_proj"
        far = dequantize(registry("formats").get("pack-quantized"), checkpoint.quantized(name))
        assert float((far - exact[f"{name}.weight"]).abs().max()) < 0.03


def test_experts_together_in_fp8_are_refused(folder, tmp_path):
    stored = {name: tensor.bfloat16() for name, tensor in tensors().items()}
    stored[f"{PREFIX}0.mlp.experts.gate_up_proj"] = torch.zeros(8, 256, 128).to(torch.float8_e4m3fn)
    name = f"{PREFIX}0.self_attn.q_proj.weight"
    stored[name], stored[f"{name}_scale_inv"] = in_squares(tensors()[name])
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {
        "quant_method": "fp8", "weight_block_size": [64, 64]}}))
    with pytest.raises(QuantkitError, match=r"gate_up_proj of .* can't be read"):
        quantize(str(folder), "int8", tmp_path / "out")


def test_a_model_that_is_published_in_4_bits_alone(folder, tmp_path):
    """compressed-tensors without quantkit.json is another tool's."""
    four = quantize(str(folder), "int4-rtn", tmp_path / "four").out
    (four / "quantkit.json").unlink()
    shown = CliRunner().invoke(quantkit, ["inspect", str(four)])
    assert shown.exit_code == 0 and "unheard_of: 2 layers" in shown.output, shown.output
    assert "bits/weight   4.2" in shown.output
    with pytest.warns(UserWarning, match="pack-quantized"):
        out = quantize(str(four), "int8", tmp_path / "out").out
    name = f"{PREFIX}1.self_attn.q_proj"
    with Checkpoint.open(out) as checkpoint:
        far = dequantize(registry("formats").get("pack-quantized"), checkpoint.quantized(name))
        assert 0.05 < float((far - tensors_of(folder, name)).abs().max()) < 0.6
        assert checkpoint.manifest.outline.quantized == 4 * 128 * 192
    config = json.loads((four / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "gptq"
    (four / "config.json").write_text(json.dumps(config))
    with pytest.raises(QuantkitError, match="gptq"):
        quantize(str(four), "int8", tmp_path / "again")


def tensors_of(folder, name: str) -> torch.Tensor:
    return open_source(str(folder)).tensor(f"{name}.weight").float()


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


def test_narrow_keys_and_values_go_with_the_queries_and_other_narrow_linears_stay():
    narrow = infos("layers.0.self_attn.k_proj.weight", "layers.0.self_attn.v_proj.weight",
                   "layers.0.indexer.wk.weight", shape=(8, 128))
    outline = outline_of_tensors("m", {"model_type": "x"}, narrow | infos("layers.0.self_attn.q_proj.weight"))
    assert {slot.name: slot.shares for slot in outline.slots} == {
        f"layers.0.self_attn.{name}": "layers.0.self_attn.qkv" for name in ("q_proj", "k_proj", "v_proj")}
    assert outline.kept == {"too narrow to save anything": 8 * 128}


def test_experts_of_granite_in_one_tensor_are_called_so():
    experts = infos("layers.0.block_sparse_moe.input_linear.weight", shape=(4, 256, 128))
    outline = outline_of_tensors("m", {"model_type": "x"}, experts | infos("layers.0.q_proj.weight"))
    assert outline.kept == {"experts in one tensor": 4 * 256 * 128}


def test_what_engines_read_only_as_it_is_stays_so():
    kept = {"layers.0.attn.compressor.wkv.weight": "a compressor of keys and values",
            "layers.0.attn.indexer.compressor.wgate.weight": "a compressor of keys and values",
            "layers.0.attn.wo_a.weight": "multiplied group by group",
            "layers.0.self_attn.o_a_proj.weight": "multiplied group by group",
            "layers.0.router.proj.weight": "a router"}
    outline = outline_of_tensors("m", {"model_type": "x"}, infos("layers.0.attn.wkv.weight", *kept))
    assert [slot.name for slot in outline.slots] == ["layers.0.attn.wkv"]
    assert outline.kept == {why: 128 * 128 * count for why, count in Counter(kept.values()).items()}


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

