"""A tiny model, and its checkpoint as another tool would write it: by NumPy, from the layouts'
descriptions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.testing import tiny_model

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False, "lm_head": False,
        "checkpoint_format": "gptq", "damp_percent": 0.01, "true_sequential": True,
        "meta": {"quantizer": ["x:1"]}}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True,
       "backend": "autoawq", "modules_to_not_convert": None, "do_fuse": False}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """float32, so that logits are sharp."""
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", "qwen2", dtype="float32",
                      tie_word_embeddings=False)


@pytest.fixture
def write(tiny: Path, tmp_path: Path, numpy_layouts: Any) -> Callable[..., tuple[Path, Path]]:
    """``write(config, change=…, keep=…)`` → the checkpoint, and the plain model that it stands for."""

    def call(config: dict[str, Any], *, keep: tuple[str, ...] = ("lm_head",),
             change: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None,
             order: Callable[[int], np.ndarray] | None = None) -> tuple[Path, Path]:
        weights, packed = load_file(tiny / "model.safetensors"), {}
        for name in [n for n in weights if n.endswith("proj.weight")
                     and n.removesuffix(".weight") not in keep]:
            layer, plain = name.removesuffix(".weight"), weights[name].numpy()
            parts, weights[name] = _layer(numpy_layouts, plain, config)
            packed |= {f"{layer}.{suffix}": torch.from_numpy(array) for suffix, array in parts.items()}
        stored = {n: t for n,
                  t in weights.items() if f"{n.removesuffix('.weight')}.qweight" not in packed} | packed
        change(stored)
        return (_folder(tiny, tmp_path / "theirs", stored, config),
                _folder(tiny, tmp_path / "plain", weights, None))

    return call


def _layer(layouts: Any, plain: np.ndarray, config: dict[str, Any]) -> tuple[dict[str, np.ndarray],
                                                                             torch.Tensor]:
    rows, bits = len(plain), config.get("bits") or config["w_bit"]
    size = config.get("group_size", config.get("q_group_size"))
    groups = plain.reshape(rows, 1 if size == -1 else -1, size if size != -1 else plain.shape[1])
    symmetric = config.get("sym", False)
    if symmetric:
        scale = np.abs(groups).max(axis=2) / (2 ** (bits - 1) - 0.5)
        zero = np.full(scale.shape, 2 ** (bits - 1))
    else:
        low, high = np.minimum(groups.min(axis=2), -1e-3), groups.max(axis=2)
        scale = (high - low) / (2**bits - 1)
        zero = np.clip(np.round(-low / scale), 1, 2**bits - 1).astype(int)
    scale = scale.astype(np.float16).astype(np.float32)
    levels = np.clip(np.round(groups / scale[..., None]) + zero[..., None], 0, 2**bits - 1).astype(int)
    levels = levels.reshape(plain.shape)
    if config["quant_method"] == "awq":
        parts = layouts.awq(levels, scale, zero)
    else:
        parts = layouts.gptq(levels, scale, zero, bits,
                             2 if config.get("checkpoint_format") == "gptq_v2" else 1)
    return parts, torch.from_numpy(layouts.dequantized(levels, scale, zero))


def _folder(tiny: Path, folder: Path, tensors: dict[str, torch.Tensor],
            quantization: dict[str, Any] | None) -> Path:
    folder.mkdir()
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((tiny / "config.json").read_text())
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((tiny / name).read_bytes())
    return folder


@pytest.fixture(scope="session")
def gptq() -> dict[str, Any]:
    return GPTQ


@pytest.fixture(scope="session")
def awq() -> dict[str, Any]:
    return AWQ
