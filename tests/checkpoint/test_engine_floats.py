"""Which engine loads NVFP4, MXFP4 and fp8 in squares: each rule is broken once, and named with the layer."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.engines import check_engine
from quantkit.checkpoint.open import open_checkpoint
from quantkit.quantization.run import quantize
from quantkit.testing import tiny_model

NVFP4 = {"kind": "fp", "bits": 4, "granularity": {"strategy": "group", "size": 16}, "scale_dtype": "e4m3"}
MXFP4 = NVFP4 | {"granularity": {"strategy": "group", "size": 32}, "scale_dtype": "e8m0"}
A = {"activations": "group"}


def squares(size: int) -> dict:
    return {"kind": "fp", "bits": 8, "granularity": {"strategy": "tile", "size": size}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Queries have 64 rows, keys and values 32, gate and up 128."""
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def make(model, tmp_path_factory):
    """``make(spec, format, head)`` → a checkpoint, made once."""
    folder, made = tmp_path_factory.mktemp("made"), {}

    def call(spec, form=None, head=False):
        key = json.dumps([spec, form, head])
        if key not in made:
            recipe = folder / f"{len(made)}.yaml"
            rule = {"match": "*", "method": "rtn", "spec": spec, **({"format": form} if form else {})}
            recipe.write_text(json.dumps({"calibration": {"windows": 2, "window": 32},
                                          "rules": [*([] if head else [{"match": "lm_head"}]), rule]}))
            made[key] = quantize(str(model), str(recipe), folder / f"out{len(made)}").out
        return made[key]

    return call


def failed(folder, engine, device) -> dict[str, str]:
    with open_checkpoint(folder) as opened:
        checks = check_engine(engine, opened, device)
    assert all(check.detail for check in checks)
    return {check.name: check.detail for check in checks if check.status == "failed"}


@pytest.mark.parametrize(("engine", "device", "spec", "form"), [
    *((engine, "cuda", spec | more, None) for engine in ("vllm", "transformers") for spec in (NVFP4, MXFP4)
      for more in ({}, A)),
    ("sglang", "cuda", NVFP4, None), ("sglang", "cuda", NVFP4 | A, None),
    *((engine, device, squares(32) | A, form) for engine, device in (
        ("vllm", "cuda"), ("transformers", "cuda"), ("transformers", "cpu"))
      for form in (None, "fine-grained-fp8")),
    ("sglang", "cuda", squares(32) | A, None), ("sglang", "cuda", squares(32) | A, "fine-grained-fp8"),
    ("sglang", "cpu", squares(32) | A, "fine-grained-fp8"),
    ("vllm", "cuda", squares(32), None), ("transformers", "cpu", NVFP4, None),
    ("transformers", "cpu", squares(32), None)], ids=str)
def test_what_loads(make, engine, device, spec, form):
    assert failed(make(spec, form), engine, device) == {}


@pytest.mark.parametrize(("engine", "device", "spec", "form", "name", "words"), [
    ("vllm", "cpu", NVFP4, None, "kernel on cpu", "for GPUs"),
    ("vllm", "cpu", MXFP4 | A, None, "kernel on cpu", "for GPUs"),
    ("vllm", "cpu", squares(32), None, "kernel on cpu", "fp8 weights without fp8 activations"),
    ("vllm", "cpu", squares(32) | A, "fine-grained-fp8", "kernel on cpu", "takes those of 128"),
    ("sglang", "cpu", NVFP4, None, "kernel on cpu", "for GPUs"),
    ("sglang", "cuda", MXFP4, None, "kernel for floats", "quantize to nvfp4"),
    ("sglang", "cuda", squares(32), None, "kernel for floats", "activations: group"),
    ("vllm", "cuda", squares(48) | A, None, "inputs", "in_features 64 is no multiple of the 48"),
    ("sglang", "cuda", squares(48) | A, "fine-grained-fp8", "inputs", "in_features 64"),
    ("transformers", "cpu", squares(48) | A, None, "inputs", "in_features 64"),
    ("vllm", "cuda", squares(64) | A, None, "fused rows", "k_proj: out_features 32 is no multiple of 64"),
    ("sglang", "cuda", squares(64) | A, "fine-grained-fp8", "fused rows", "k_proj"),
    ("transformers", "cpu", squares(48) | A, "fine-grained-fp8", "squares", "whole squares of 48")], ids=str)
def test_what_an_engine_refuses(make, engine, device, spec, form, name, words):
    faults = failed(make(spec, form), engine, device)
    assert words in faults[name] and ("layers." in faults[name] or engine == "sglang")


def test_squares_that_are_larger_than_a_layer_are_whole(make):
    assert failed(make(squares(256) | A, "fine-grained-fp8"), "transformers", "cpu") == {}


def test_a_head_in_squares(make):
    fault = failed(make(squares(32) | A, head=True), "sglang", "cuda")["kernel for floats"]
    assert fault.startswith("lm_head") and "strategy channel" in fault


@pytest.mark.parametrize("suffix", ["weight_global_scale", "input_global_scale"])
def test_fused_layers_must_share_global_scales(make, tmp_path, suffix):
    folder = tmp_path / "other"
    shutil.copytree(make(NVFP4 | A), folder)
    (folder / "quantkit.json").unlink()
    stored = load_file(folder / "model.safetensors")
    stored[f"model.layers.1.self_attn.k_proj.{suffix}"] *= 2
    stored[f"model.layers.0.mlp.down_proj.{suffix}"] *= torch.tensor(3.0)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    for engine in ("vllm", "sglang"):
        (fault,) = failed(folder, engine, "cuda").values()
        assert "layers.1.self_attn.k_proj: has global scales" in fault and "more)" not in fault
    assert failed(folder, "transformers", "cuda") == {}


def test_the_card_says_how_to_load(make):
    text = (make(squares(32) | A, "fine-grained-fp8") / "README.md").read_text()
    assert "vllm serve" in text and "pip install transformers accelerate" in text
