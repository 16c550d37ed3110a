"""NVFP4, MXFP4 and fp8 in squares beside transformers with compressed-tensors, and beside llm-compressor.

What transformers dequantizes of our files must equal our weights bit for bit, and what llm-compressor wrote
must be read by us with the weights that its own library reads. llm-compressor isn't installed beside
quantkit: ``QUANTKIT_TEST_LLMCOMPRESSOR`` names the python of an environment that has it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import warnings

import pytest
import torch

from quantkit.checkpoint.open import open_checkpoint
from quantkit.plugins.manager import registry
from quantkit.quantization.run import quantize
from quantkit.runtime.loader import load
from quantkit.testing import tiny_model
from quantkit.testing.formats import random_codes
from tests.helpers.quantized import quant_spec

pytestmark = pytest.mark.oracle
transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: oracle)")
pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed (extra: oracle)")

NVFP4 = "kind: fp, bits: 4, granularity: {strategy: group, size: 16}, scale_dtype: e4m3"
MXFP4 = "kind: fp, bits: 4, granularity: {strategy: group, size: 32}, scale_dtype: e8m0"
SQUARES = "kind: fp, bits: 8, granularity: {strategy: tile, size: 32}"
CUT = "kind: fp, bits: 8, granularity: {strategy: tile, size: 48}"
A = "activations: group"
SPECS = {"nvfp4": NVFP4, "nvfp4-a4": f"{NVFP4}, {A}", "mxfp4": MXFP4, "mxfp4-a4": f"{MXFP4}, {A}",
         "fp8-block": f"{SQUARES}, {A}", "fp8-weights": SQUARES, "fp8-weights-cut": CUT}
IDS = torch.randint(4, 300, (2, 24), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {dtype: tiny_model(tmp_path_factory.mktemp("models") / dtype, "qwen2", dtype=dtype,
                              tie_word_embeddings=False) for dtype in ("float32", "bfloat16")}


@pytest.fixture
def make(models, tmp_path):
    """``make(spec, dtype, method, format)`` → a checkpoint of the model of that dtype."""
    def call(spec, dtype, method="gptq", form=None):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(
            "calibration: {windows: 4, window: 32}\nrules:\n  - {match: lm_head}\n"
            f"  - {{match: '*', method: {method}, spec: {{{spec}}}"
            + (f", format: {form}" if form else "") + "}\n")
        return quantize(str(models[dtype]), str(recipe), tmp_path / "out").out

    return call


def theirs(folder, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, attn_implementation="eager", output_loading_info=True, **options)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def weights_of(folder) -> dict[str, torch.Tensor]:
    """Dequantized, float32, by layer."""
    with open_checkpoint(folder) as opened:
        return {row.name: registry("formats").get(row.format).dequantize(packed)
                for row in opened.layers if (packed := opened.quantized(row.name)) is not None}


def same_weights(folder, model) -> None:
    modules = dict(model.named_modules())
    for layer, weight in weights_of(folder).items():
        stored = modules[layer].weight
        assert torch.equal(stored, weight.to(stored.dtype)), layer


@torch.no_grad()
def near(folder, model, share: float) -> None:
    """For a share of the tokens the same logits but for the order of sums, and nearly for the others."""
    expected = model(IDS).logits.float()
    apart = load(str(folder), dtype="float32").model(IDS) - expected
    assert expected.std() > 0.5
    assert (apart.abs().amax(-1) <= 1e-4).float().mean() >= share and apart.norm() <= 0.05 * expected.norm()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", [name for name in SPECS if name.startswith("fp8")])
def test_transformers_reads_squares(make, name, dtype):
    """A quotient beside the middle of two levels, which float32's last bit decides, may go either way where
    activations are rounded, and changes what follows."""
    folder = make(SPECS[name], dtype)
    model = theirs(folder)
    with torch.no_grad():
        model(IDS)  # decompresses
    same_weights(folder, model)
    if dtype == "float32":
        near(folder, model, 0.4 if A in SPECS[name] else 1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name in SPECS if not name.startswith("fp8")])
def test_transformers_reads_4_bit_floats(make, name):
    """They are bfloat16 there, whatever the model is, which holds a level times a scale and a power of 2."""
    folder = make(SPECS[name], "bfloat16")
    model = theirs(folder)
    with torch.no_grad():
        model(IDS)
    same_weights(folder, model)
    near(folder, torch.nn.Module.float(model), 0.2 if A in SPECS[name] else 1)


@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_transformers_reads_deepseeks_layout(make, method):
    folder = make(f"{SQUARES}, {A}", "float32", method, "fine-grained-fp8")
    model = theirs(folder)  # without a GPU it dequantizes, and leaves activations alone
    modules = dict(model.named_modules())
    for layer, weight in weights_of(folder).items():
        stored = modules[layer].weight
        assert torch.equal(stored, weight.to(stored.dtype)), layer


def test_gpt_oss_has_the_bytes_of_mxfp4():
    """Its ``_blocks`` are the packed bytes in groups of 16, its ``_scales`` ours."""
    integration = pytest.importorskip("transformers.integrations.mxfp4")
    form = registry("formats").get("mxfp4-pack-quantized")
    experts = [form.pack(random_codes(quant_spec("fp", 4, "group", 32, scale_dtype="e8m0"), (24, 64), seed),
                         torch.bfloat16) for seed in range(2)]
    blocks = torch.stack([expert.tensors["weight_packed"].view(24, 2, 16) for expert in experts])
    scales = torch.stack([expert.tensors["weight_scale"] for expert in experts])
    dense = integration.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    for expert, weight in zip(experts, dense, strict=True):
        assert torch.equal(weight.T, form.dequantize(expert))


# -- llm-compressor

MAKE = """
import sys
import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoModelForCausalLM, AutoTokenizer

model, out, scheme, name = sys.argv[1:]
modifier = {"rtn": QuantizationModifier, "gptq": GPTQModifier}[name]
loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto", local_files_only=True)
tokens = torch.randint(4, 300, (4, 32), generator=torch.Generator().manual_seed(0))
data = Dataset.from_dict({"input_ids": tokens.tolist(), "attention_mask": torch.ones_like(tokens).tolist()})
oneshot(model=loaded, recipe=[modifier(targets=["Linear"], scheme=scheme, ignore=["lm_head"])], dataset=data,
        tokenizer=AutoTokenizer.from_pretrained(model, local_files_only=True), num_calibration_samples=4,
        max_seq_length=32, shuffle_calibration_samples=False)
loaded.save_pretrained(out, save_compressed=True)
"""
PYTHON = os.environ.get("QUANTKIT_TEST_LLMCOMPRESSOR")


@pytest.mark.skipif(PYTHON is None, reason="QUANTKIT_TEST_LLMCOMPRESSOR doesn't name the python of an "
                                           "environment with llm-compressor")
@pytest.mark.parametrize(("scheme", "method", "label", "activations"), [
    ("NVFP4A16", "rtn", "fp4 g16 e4m3", None), ("NVFP4", "gptq", "fp4 g16 e4m3 a4", "group"),
    ("MXFP4A16", "gptq", "fp4 g32 e8m0", None), ("MXFP4", "rtn", "fp4 g32 e8m0 a4", "group"),
    ("FP8_BLOCK", "rtn", "fp8 t128 a8", "group")], ids=str)
def test_what_llm_compressor_wrote_is_read(tmp_path, scheme, method, label, activations):
    model = tiny_model(tmp_path / "model", hidden_size=128, intermediate_size=256)
    done = subprocess.run([str(PYTHON), "-c", MAKE, model, tmp_path / "out", scheme, method], text=True,
                          capture_output=True, timeout=600, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, tmp_path / "out" / name)
    with open_checkpoint(tmp_path / "out") as opened:
        specs = {row.spec for row in opened.layers if row.spec is not None}
    assert [(spec.label(), spec.activations) for spec in specs] == [(label, activations)]
    loaded = theirs(tmp_path / "out")
    with torch.no_grad():
        expected = loaded(IDS).logits.float()
    same_weights(tmp_path / "out", loaded)
    ours = load(str(tmp_path / "out")).model(IDS).float()
    # theirs is bfloat16 throughout, and 4 bits of an activation go either way easily
    assert (ours - expected).norm() <= (0.5 if label.endswith("a4") else 0.1) * expected.norm()
