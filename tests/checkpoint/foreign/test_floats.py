"""NVFP4, MXFP4 and fp8 in squares as other tools store them: read as ours, and hostile files refused."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.open import open_checkpoint
from quantkit.export.layouts import export
from quantkit.plugins.manager import registry
from quantkit.quantization.run import quantize
from quantkit.runtime.loader import load
from quantkit.support.errors import QuantkitError

IDS = torch.randint(4, 300, (1, 12), generator=torch.Generator().manual_seed(5))
Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"
NVFP4 = {"kind": "fp", "bits": 4, "granularity": {"strategy": "group", "size": 16}, "scale_dtype": "e4m3"}
MXFP4 = NVFP4 | {"granularity": {"strategy": "group", "size": 32}, "scale_dtype": "e8m0"}
SQUARES = {"kind": "fp", "bits": 8, "granularity": {"strategy": "tile", "size": 48}}
A = {"activations": "group"}
RULES = {"nvfp4": {"spec": NVFP4}, "nvfp4-a4": {"spec": NVFP4 | A}, "mxfp4": {"spec": MXFP4},
         "mxfp4-a4": {"spec": MXFP4 | A}, "fp8-block": {"spec": SQUARES | A},
         "fp8-weights": {"spec": SQUARES}, "deepseek": {"spec": SQUARES | A, "format": "fine-grained-fp8"}}


@pytest.fixture(scope="session")
def written(tiny, tmp_path_factory):
    """``written(name)`` → the checkpoint of a rule, as quantkit writes it."""
    folder, made = tmp_path_factory.mktemp("floats"), {}

    def call(name):
        if name not in made:
            recipe, rule = folder / f"{name}.yaml", {"match": "*", "method": "rtn", **RULES[name]}
            recipe.write_text(json.dumps({"calibration": {"windows": 2, "window": 32},
                                          "rules": [{"match": "lm_head"}, rule]}))
            made[name] = quantize(str(tiny), str(recipe), folder / name).out
        return made[name]

    return call


@pytest.fixture
def theirs(written, tmp_path):
    """``theirs(name, tensors=…, weights=…, inputs=…, config=…)`` → the same as another tool's, changed."""
    def call(name, tensors=lambda tensors: None, **changes):
        folder = tmp_path / "theirs"
        shutil.copytree(written(name), folder)
        (folder / "quantkit.json").unlink()
        stored = load_file(folder / "model.safetensors")
        tensors(stored)
        save_file({key: tensor.contiguous() for key, tensor in stored.items()}, folder / "model.safetensors",
                  {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        quantization = config["quantization_config"]
        quantization |= changes.pop("config", {})
        group = quantization.get("config_groups", {}).get("group_0", {})
        for key, change in changes.items():
            group[key] = group[key] | change
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return call


@pytest.mark.parametrize("name", RULES)
def test_ours_without_a_manifest_reads_all_the_same(written, theirs, name):
    expected = load(str(written(name)), dtype="float32").model(IDS)
    folder = theirs(name)
    with open_checkpoint(folder) as opened, open_checkpoint(written(name)) as ours:
        assert opened.manifest is None
        assert [row.spec for row in opened.layers] == [
            row.spec if row.spec is None or row.spec.scale_dtype != "model" else None for row in ours.layers]
    assert torch.equal(load(str(folder), dtype="float32").model(IDS), expected)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-a4"])
def test_fused_layers_share_their_global_scale(written, name):
    stored = load_file(written(name) / "model.safetensors")
    for place, names in (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj"))):
        for suffix in ("weight_global_scale", "input_global_scale")[:1 + (name == "nvfp4-a4")]:
            scales = {float(stored[f"model.layers.1.{place}.{name}.{suffix}"]) for name in names}
            assert len(scales) == 1 and float(torch.frexp(torch.tensor(scales.pop())).mantissa) == 0.5


def test_any_global_scale_and_what_observers_leave(theirs):
    def change(tensors):
        tensors[f"{Q}.weight_global_scale"] *= 1.3

    leftovers = {"observer": "memoryless_minmax", "observer_kwargs": {}, "zp_dtype": None, "actorder": None,
                 "block_structure": None}
    folder = theirs("nvfp4", tensors=change, weights=leftovers)
    with open_checkpoint(folder) as opened:
        packed = opened.quantized(Q)
    form = registry("formats").get("nvfp4-pack-quantized")
    again = form.pack(form.unpack(packed), torch.float32)
    assert torch.equal(form.dequantize(again), form.dequantize(packed))
    assert torch.equal(again.tensors["weight_global_scale"], packed.tensors["weight_global_scale"])


def test_another_tools_checkpoint_is_packed_again(theirs, tmp_path):
    def change(tensors):
        for name in [name for name in tensors if name.endswith("weight_global_scale")]:
            tensors[name] *= 1.7

    folder = theirs("nvfp4-a4", tensors=change)
    out = export(str(folder), "nvfp4-pack-quantized", tmp_path / "out").out
    expected = load(str(folder), dtype="float32").model(IDS)
    assert torch.equal(load(str(out), dtype="float32").model(IDS), expected)


def test_scales_in_bfloat16_as_qwen_stores_them(written, theirs):
    def change(tensors):
        for name in [name for name in tensors if name.endswith("weight_scale_inv")]:
            tensors[name] = tensors[name].to(torch.bfloat16)

    with open_checkpoint(theirs("deepseek", tensors=change)) as opened:
        scale = opened.quantized(Q).tensors["weight_scale_inv"]
    with open_checkpoint(written("deepseek")) as ours:
        expected = ours.quantized(Q).tensors["weight_scale_inv"]
    assert scale.dtype == torch.float32 and torch.equal(scale, expected.to(torch.bfloat16).float())


def refused(folder) -> str:
    with pytest.raises(QuantkitError) as caught:
        load(str(folder))
    assert caught.value.next
    return str(caught.value)


@pytest.mark.parametrize(("name", "where", "change", "words"), [
    ("nvfp4", "weights", {"group_size": 32}, "holds fp4 in groups of 16"),
    ("nvfp4", "weights", {"strategy": "group"}, "with e4m3 or e8m0 scales"),
    ("nvfp4", "weights", {"type": "int"}, "e4m3 scales are for kind 'fp'"),
    ("nvfp4", "weights", {"symmetric": False}, "symmetric"),
    ("nvfp4", "weights", {"num_bits": 8}, "'strategy'"),
    ("nvfp4", "weights", {"strategy": ["group"]}, "'strategy'"),
    ("mxfp4", "weights", {"strategy": "tensor_group"}, "'strategy'"),
    ("mxfp4", "weights", {"group_size": 16}, "holds fp4 in groups of 32"),
    ("nvfp4-a4", "input_activations", {"dynamic": True}, "'strategy'"),
    ("nvfp4-a4", "input_activations", {"dynamic": False}, "scale is in the file"),
    ("nvfp4-a4", "input_activations", {"group_size": 32}, "'strategy'"),
    ("nvfp4-a4", "input_activations", {"scale_dtype": "torch.uint8"}, "'strategy'"),
    ("nvfp4-a4", "input_activations", {"scale_dtype": [1]}, "'scale_dtype'"),
    ("mxfp4-a4", "input_activations", {"scale_dtype": None}, "'strategy'"),
    ("mxfp4-a4", "input_activations", {"num_bits": 8}, "same kind and bits"),
    ("mxfp4-a4", "input_activations", {"group_size": "32"}, "'group_size'"),
    ("fp8-block", "weights", {"block_structure": [48, 16]}, "only squares"),
    ("fp8-block", "weights", {"block_structure": None}, "only squares"),
    ("fp8-block", "weights", {"block_structure": [2**70] * 2}, "only squares"),
    ("fp8-block", "weights", {"block_structure": [True, True]}, "only squares"),
    ("fp8-weights", "weights", {"block_structure": [16, 16]}, "weight_scale"),
    ("fp8-block", "input_activations", {"group_size": 16}, "'strategy'"),
    ("fp8-block", "input_activations", {"strategy": "token", "group_size": None}, "'strategy'"),
    ("deepseek", "config", {"weight_block_size": None}, "only squares"),
    ("deepseek", "config", {"weight_block_size": [48, 48, 48]}, "only squares"),
    ("deepseek", "config", {"weight_block_size": [16, 16]}, "q_proj"),
    ("deepseek", "config", {"activation_scheme": "static"}, "'activation_scheme'"),
    ("deepseek", "config", {"scale_fmt": "ue8m0"}, "'scale_fmt'"),
    ("deepseek", "config", {"expert_dtype": "fp4"}, "'expert_dtype'"),
    ("deepseek", "config", {"modules_to_convert": ["model.embed_tokens"]}, "'modules_to_convert'"),
    ("deepseek", "config", {"modules_to_not_convert": "lm_head"}, "list of names"),
    ("deepseek", "config", {"modules_to_not_convert": ["model.layers.0"]}, "says that it isn't"),
    ("deepseek", "config", {"surprise": 1}, "'surprise'")], ids=str)
def test_what_configs_are_refused(theirs, name, where, change, words):
    assert words in refused(theirs(name, **{where: change}))


def _set(suffix, value, layer=Q):
    def change(tensors):
        tensors[f"{layer}.{suffix}"].view(torch.uint8).view(-1)[:4] = torch.tensor(value, dtype=torch.uint8)
    return change


def _float(suffix, value):
    return lambda tensors: tensors[f"{Q}.{suffix}"].fill_(value)


def _replace(suffix, change):
    return lambda tensors: tensors.update({f"{Q}.{suffix}": change(tensors[f"{Q}.{suffix}"])})


@pytest.mark.parametrize(("name", "change", "words"), [
    ("nvfp4", lambda t: t.pop(f"{Q}.weight_global_scale"), "has no weight_global_scale"),
    ("nvfp4", lambda t: t.pop(f"{Q}.weight_packed"), "has no weight_packed"),
    ("nvfp4-a4", lambda t: t.pop(f"{UP}.input_global_scale"), "has no input_global_scale"),
    ("nvfp4", _float("weight_global_scale", torch.inf), "not finite"),
    ("nvfp4", _float("weight_global_scale", 0), "not finite"),
    ("nvfp4", _float("weight_global_scale", -8), "not positive"),
    ("nvfp4", _float("weight_global_scale", 1e-45), "not finite"),
    ("nvfp4-a4", _float("input_global_scale", torch.nan), "not finite"),
    ("nvfp4-a4", _float("input_global_scale", 0), "not positive"),
    ("nvfp4", _set("weight_scale", [0x7F, 0, 0, 0]), "not finite"),
    ("nvfp4", _set("weight_scale", [0x80 | 20, 0, 0, 0]), "not positive"),
    ("nvfp4", _replace("weight_scale", lambda t: t.float()), "weight_scale"),
    ("nvfp4", _replace("weight_global_scale", lambda t: t.repeat(3)), "weight_global_scale"),
    ("nvfp4", _replace("weight_packed", lambda t: t[:, :8].contiguous()), "weight_packed"),
    ("mxfp4", _set("weight_scale", [255, 100, 100, 100]), "not finite"),
    ("mxfp4", _replace("weight_scale", lambda t: t[:1].contiguous()), "weight_scale"),
    ("fp8-block", _set("weight", [0x7F, 0xFF, 0, 0]), "NaN"),
    ("fp8-block", _replace("weight_scale", lambda t: t[:1].contiguous()), "weight_scale"),
    ("deepseek", lambda t: t.pop(f"{Q}.weight"), "has no weight"),
    ("deepseek", _float("weight_scale_inv", torch.inf), "not finite"),
    ("deepseek", _replace("weight_scale_inv", lambda t: t.to(torch.float8_e4m3fn)), "weight_scale_inv"),
    ("deepseek", _replace("weight_scale_inv", lambda t: t.flatten()), "other shapes"),
    ("deepseek", lambda t: t.pop(f"{Q}.weight_scale_inv"), "no plain weight")])
def test_damaged_tensors_are_refused(theirs, name, change, words):
    assert words in refused(theirs(name, tensors=change))
