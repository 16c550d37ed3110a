"""Checkpoints that bitsandbytes and compressed-tensors made themselves: read, and compared with
transformers.
"""

from __future__ import annotations

import json
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.open import open_checkpoint
from quantkit.plugins.manager import registry
from quantkit.runtime.loader import load
from quantkit.support.errors import CheckpointError, QuantkitError
from quantkit.testing import tiny_model

pytestmark = pytest.mark.oracle
transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: oracle)")
BOUND = 1e-4
IDS = torch.randint(4, 300, (2, 24), generator=torch.Generator().manual_seed(5))
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def plain(request, tmp_path_factory):
    tied = request.param == "llama"
    return tiny_model(tmp_path_factory.mktemp("plain") / request.param, request.param, dtype="float32",
                      tie_word_embeddings=tied)


def theirs(folder, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, attn_implementation="eager", **options).eval()


def weights_of(folder) -> dict[str, torch.Tensor]:
    with open_checkpoint(folder) as opened:
        return {row.name: registry("formats").get(row.format).dequantize(packed)
                for row in opened.layers if (packed := opened.quantized(row.name)) is not None}


@torch.no_grad()
def logits_agree(folder, hf, bound=BOUND) -> None:
    expected = hf(IDS).logits.float()
    assert expected.std() > 0.5
    assert (load(str(folder), dtype="float32").model(IDS) - expected).abs().max().item() <= bound


# -- bitsandbytes


def bnb(plain, folder, **options):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    made = theirs(plain, quantization_config=transformers.BitsAndBytesConfig(**options))
    made.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(plain / name, folder / name)
    return folder


@pytest.mark.sampled(3)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("storage", ["uint8", "bfloat16"])
def test_nf4(plain, tmp_path, nested, storage):
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    folder = bnb(plain, tmp_path / "nf4", load_in_4bit=True, bnb_4bit_quant_type="nf4",
                 bnb_4bit_use_double_quant=nested, bnb_4bit_quant_storage=storage,
                 bnb_4bit_compute_dtype=torch.float32)
    hf = theirs(folder)
    modules = dict(hf.named_modules())
    ours = weights_of(folder)
    assert len(ours) == 14
    for layer, weight in ours.items():  # before any forward: that repacks on a CPU
        packed = modules[layer].weight
        assert torch.equal(functional.dequantize_4bit(packed.data, packed.quant_state), weight), layer
    logits_agree(folder, hf)
    assert load(str(folder)).label == f"bitsandbytes nf4 b64{' nested' if nested else ''}"


def test_int8(plain, tmp_path):
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    folder = bnb(plain, tmp_path / "int8", load_in_8bit=True)
    stored = load_file(folder / "model.safetensors")
    ours = weights_of(folder)
    assert len(ours) == 14
    dense = load_file(plain / "model.safetensors")
    for layer, weight in ours.items():
        assert torch.equal(weight, functional.int8_vectorwise_dequant(
            stored[f"{layer}.weight"], stored[f"{layer}.SCB"])), layer
        dense[f"{layer}.weight"] = weight
    # their matrix product also rounds activations to int8, so the weights are compared in a plain model
    shutil.copytree(plain, tmp_path / "dense")
    save_file(dense, tmp_path / "dense" / "model.safetensors", {"format": "pt"})
    logits_agree(folder, theirs(tmp_path / "dense"))
    with torch.no_grad():
        rounded = theirs(folder)(IDS).logits.float()
    exact = load(str(folder), dtype="float32").model(IDS)
    assert (rounded - exact).norm() / exact.norm() < 0.05


def test_fp4_is_refused(plain, tmp_path):
    folder = bnb(plain, tmp_path / "fp4", load_in_4bit=True, bnb_4bit_quant_type="fp4")
    with pytest.raises(CheckpointError, match="bnb_4bit_quant_type"):
        load(str(folder))


# -- compressed-tensors

GROUPS = {
    "w4-g32": {"group_0": ({"num_bits": 4, "strategy": "group", "group_size": 32}, ["Linear"])},
    "w8-channel": {"group_0": ({"num_bits": 8, "strategy": "channel"}, ["Linear"])},
    "w4-g64-asym": {"group_0": ({"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False},
                                ["Linear"])},
    "w3-g32": {"group_0": ({"num_bits": 3, "strategy": "group", "group_size": 32}, ["Linear"])},
    "mixed": {"group_0": ({"num_bits": 8, "strategy": "channel"}, ["re:.*self_attn.*"]),
              "group_1": ({"num_bits": 4, "strategy": "group", "group_size": 32, "actorder": "static"},
                          ["Linear"])},
    "names": {"group_0": ({"num_bits": 8, "strategy": "channel"}, [
        "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "re:.*layers.1.*q_proj$"])},
}


def compressed(plain, folder, groups, ignore=("lm_head",), form="pack-quantized", inputs=None):
    """By their own library: which module has which scheme, the tensors, and the config."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed (extra: oracle)")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    made = theirs(plain)
    activations = None if inputs is None else QuantizationArgs(**inputs)
    schemes = {name: QuantizationScheme(targets=targets, weights=QuantizationArgs(**arguments), format=form,
                                        input_activations=activations)
               for name, (arguments, targets) in groups.items()}
    config = QuantizationConfig(config_groups=schemes, ignore=list(ignore), format=form,
                                quantization_status="compressed")
    stored = load_file(plain / "model.safetensors")
    apply_quantization_config(made, config)
    for layer, module in made.named_modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        weight = stored.pop(f"{layer}.weight")
        size = scheme.weights.group_size or weight.shape[1]
        grouped = weight.view(weight.shape[0], -1, size)
        low, high = grouped.amin(-1), grouped.amax(-1)
        if scheme.weights.strategy == "tensor":
            low, high = low.amin().reshape(1), high.amax().reshape(1)
        scale, zero = calculate_qparams(low, high, scheme.weights)
        state = {"weight": weight, "weight_scale": scale}
        if not scheme.weights.symmetric:
            state["weight_zero_point"] = zero
        stored |= {f"{layer}.{suffix}": tensor.contiguous() for suffix, tensor in
                   BaseCompressor.load_from_registry(form).compress(state, scheme).items()}
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    plain_config = json.loads((plain / "config.json").read_text())
    plain_config["quantization_config"] = json.loads(config.model_dump_json())
    (folder / "config.json").write_text(json.dumps(plain_config))
    for name in TOKENIZER:
        shutil.copy(plain / name, folder / name)
    return folder


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", GROUPS)
def test_pack_quantized(plain, tmp_path, name):
    folder = compressed(plain, tmp_path / name, GROUPS[name])
    hf = theirs(folder, quantization_config=transformers.CompressedTensorsConfig(dequantize=True)) if (
        "asym" in name) else theirs(folder)
    with torch.no_grad():
        hf(IDS)  # decompresses
    modules, ours = dict(hf.named_modules()), weights_of(folder)
    assert len(ours) == (3 if name == "names" else 14)
    for layer, weight in ours.items():
        assert torch.equal(modules[layer].weight, weight), layer
    logits_agree(folder, hf)
    kinds = {"mixed": {3, 8, 4} - {3}, "names": {8}}.get(name)
    if kinds:
        with open_checkpoint(folder) as opened:
            assert {row.spec.bits for row in opened.layers if row.spec} == kinds


INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
E4M3 = INT8 | {"type": "float"}
PLAIN = {
    "w8a8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, INT8),
    "w8a8-tensor": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}, INT8),
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, E4M3),
    "fp8-tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, E4M3),
    "fp8-weights": ("naive-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, None),
    "fp8-weights-tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, None),
    "w8a16": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, None),
    "w8a16-tensor": ("naive-quantized", {"num_bits": 8, "strategy": "tensor"}, None),
    "w8a16-g32-asym": ("int-quantized", {"num_bits": 8, "strategy": "group", "group_size": 32,
                                         "symmetric": False}, None),
    "w4a16-g32": ("naive-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}, None),
    "w3a16-asym": ("naive-quantized", {"num_bits": 3, "strategy": "channel", "symmetric": False}, None),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PLAIN)
def test_a_byte_a_weight(plain, tmp_path, monkeypatch, name):
    """Weights as their own library decompresses them, bit for bit; logits as transformers computes them."""
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward",
                                  reason="compressed-tensors is not installed (extra: oracle)")
    form, weights, inputs = PLAIN[name]
    folder = compressed(plain, tmp_path / name, {"group_0": (weights, ["Linear"])}, form=form, inputs=inputs)
    ours = weights_of(folder)
    options = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
    modules = dict(theirs(folder, **options).named_modules())
    assert len(ours) == 14
    for layer, weight in ours.items():
        assert torch.equal(modules[layer].weight, weight), layer
    with open_checkpoint(folder) as opened:
        spec, layout = opened.layers[0].spec, opened.layers[0].format
    assert spec.activations == ("token" if inputs else None)
    assert layout == ("pack-quantized" if inputs is None and spec.kind == "int" else form if inputs else
                      "float-quantized")
    if inputs is None:
        return logits_agree(folder, theirs(folder, **options))
    if inputs is INT8:  # a token's scale as in every engine's kernels, where theirs simulates max / 127.5
        simulated = forward.compute_dynamic_scales_and_zp
        monkeypatch.setattr(forward, "compute_dynamic_scales_and_zp", lambda value, args, *rest, **more: (
            value.abs().amax(-1, keepdim=True) / 127, simulated(value, args, *rest, **more)[1]))
    with torch.no_grad():
        expected = theirs(folder)(IDS).logits.float()
    # a quotient beside a half, which float32's last bit decides, may go either way
    apart = load(str(folder), dtype="float32").model(IDS) - expected
    assert (apart.abs().amax(-1) <= BOUND).float().mean() >= 0.5
    assert apart.norm() <= 0.02 * expected.norm()


def test_zeros_beside_symmetric_weights_are_dropped_and_others_refused(plain, tmp_path):
    """Older versions of compressed-tensors left them."""
    form, weights, inputs = PLAIN["w8a8"]
    folder = compressed(plain, tmp_path / "w", {"group_0": (weights, ["Linear"])}, form=form, inputs=inputs)
    stored, before = load_file(folder / "model.safetensors"), weights_of(folder)
    layer = "model.layers.0.mlp.up_proj"
    zeros = torch.zeros(stored[f"{layer}.weight"].shape[0], 1, dtype=torch.int8)
    save_file(stored | {f"{layer}.weight_zero_point": zeros}, folder / "model.safetensors", {"format": "pt"})
    assert torch.equal(weights_of(folder)[layer], before[layer])
    stored[f"{layer}.weight_zero_point"] = zeros + 1
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{layer} has zero points"):
        load(str(folder))


def test_codes_beyond_their_bits_and_weights_of_another_dtype_are_refused(plain, tmp_path):
    form, weights, inputs = PLAIN["w4a16-g32"]
    folder = compressed(plain, tmp_path / "w", {"group_0": (weights, ["Linear"])}, form=form, inputs=inputs)
    stored, layer = load_file(folder / "model.safetensors"), "model.layers.0.mlp.up_proj"
    wide = stored[f"{layer}.weight"].clone()
    wide[3, 5] = 8
    for weight, said in ((wide, "beyond 4 bits"), (wide.float(), "is torch.float32"),
                         (wide[1:], "is torch.int8")):
        stored[f"{layer}.weight"] = weight.contiguous()
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=f"{layer}.*{said}"):
            load(str(folder))


@pytest.mark.parametrize(("inputs", "said"), [
    ({"dynamic": False, "strategy": "tensor"}, "scale is in the file"),
    ({"dynamic": False}, "scale is in the file"), ({"dynamic": "local"}, "dynamic"),
    ({"strategy": "tensor"}, "a scale a token"), ({"symmetric": False}, "symmetric"),
    ({"type": "float"}, "same kind and bits"), ({"num_bits": 4}, "same kind and bits"),
    ({"surprise": 1}, "surprise"), ([8], "input_activations")], ids=str)
def test_what_activations_are_refused(plain, tmp_path, inputs, said):
    form, weights, good = PLAIN["w8a8"]
    folder = compressed(plain, tmp_path / "w", {"group_0": (weights, ["Linear"])}, form=form, inputs=good)
    config = json.loads((folder / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] = group["input_activations"] | inputs if isinstance(inputs, dict) else inputs
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="group_0") as caught:
        load(str(folder))
    assert said in str(caught.value) and caught.value.next


@pytest.mark.parametrize(("change", "said"), [
    ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"), ({"new": 1}, "'new'"),
    ({"transform_config": {"config_groups": {"a": {}}}}, "transform_config"),
    ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    ({"ignore": "lm_head"}, "'ignore'"), ({"ignore": ["re:("]}, "regular expression"),
    ({"config_groups": {}}, "config_groups"), ({"format": "marlin-24"}, None)], ids=str)
def test_foreign_checkpoints_that_are_refused(plain, tmp_path, change, said):
    folder = compressed(plain, tmp_path / "w", GROUPS["w4-g32"])
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= change
    if said is None:  # the group's own format counts before the whole's
        config["quantization_config"]["config_groups"]["group_0"]["format"] = "marlin-24"
        said = "marlin-24"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(QuantkitError, match="quantization_config") as caught:
        load(str(folder))
    assert said in str(caught.value) and caught.value.next


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("key", "value"), [
    ("input_activations", {"num_bits": 8}), ("weights", {"num_bits": 4, "type": "float"}),
    ("weights", {"num_bits": 4, "strategy": "block", "block_structure": [8, 8]}),
    ("weights", {"num_bits": 4, "strategy": "group", "group_size": 32, "actorder": "group"}),
    ("weights", None), ("weights", [4]), ("targets", None), ("targets", [3]),
    ("weights", {"num_bits": 4, "dynamic": True}), ("weights", {"num_bits": 4, "surprise": 1})], ids=str)
def test_what_groups_are_refused(plain, tmp_path, key, value):
    folder = compressed(plain, tmp_path / "w", GROUPS["w4-g32"])
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"][key] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="group_0"):
        load(str(folder))
