"""llm-compressor's methods with its own settings: GPTQ with static activation order, AWQ and AutoRound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import common
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.autoround import AutoRoundModifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform import AWQModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

FORMAT = "pack-quantized"


def make(model: Path, tokens: torch.Tensor | None, spec: dict[str, Any], scratch: Path) -> common.Found:
    """Calibrated, a window at a time."""
    group = spec["group"]
    grid = {"strategy": "group", "group_size": group} if group > 0 else {"strategy": "channel"}
    args = QuantizationArgs(num_bits=spec["bits"], type="int", symmetric=spec["symmetric"], **grid)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=FORMAT)
    modifiers, settings = recipe(spec, {"config_groups": {"all": scheme}, "ignore": ["lm_head"]})
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto", local_files_only=True)
    data = {} if tokens is None else {
        "dataset": Dataset.from_dict({"input_ids": tokens.tolist(),
                                      "attention_mask": torch.ones_like(tokens).tolist()}),
        "num_calibration_samples": len(tokens), "max_seq_length": tokens.shape[1],
        "shuffle_calibration_samples": False}
    oneshot(model=loaded, recipe=modifiers, **data,
            tokenizer=AutoTokenizer.from_pretrained(model, local_files_only=True))
    loaded.save_pretrained(scratch, save_compressed=True)
    layers = list(common.linears(model))
    bits = common.stored_bits(scratch, layers)
    compressor, weights = BaseCompressor.get_value_from_registry(FORMAT), {}
    for layer, parts in common.parts_of(scratch, layers).items():
        parts["weight_scale"] = parts["weight_scale"].float()  # or products are rounded to its dtype
        weights[layer] = compressor.decompress(parts, scheme)["weight"]
    return weights | norms(scratch), bits, settings


def recipe(spec: dict[str, Any], grid: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Its modifiers of a method, and what is worth telling about them."""
    if spec["method"] == "awq":
        if not torch.accelerator.is_available():  # what it pins is for copies to one
            IntermediatesCache.pin_memory = lambda *_: None
        modifier = AWQModifier()
        return [modifier, QuantizationModifier(**grid)], {"duo_scaling": modifier.duo_scaling,
                                                          "n_grid": modifier.n_grid}
    if spec["method"] == "autoround":
        modifier = AutoRoundModifier(**grid, iters=spec["iters"], enable_torch_compile=False)
        return [modifier], {"iters": modifier.iters, "batch_size": modifier.batch_size}
    modifier = GPTQModifier(**grid, actorder="static")
    return [modifier], {"actorder": "static", "dampening_frac": modifier.dampening_frac}


def norms(folder: Path) -> dict[str, torch.Tensor]:
    """Vectors of the decoder layers, which AWQ scales."""
    saved = {name: tensor for shard in sorted(folder.glob("*.safetensors"))
             for name, tensor in load_file(shard).items()}
    return {name.removesuffix(".weight"): tensor for name, tensor in saved.items()
            if ".layers." in name and name.endswith("norm.weight")}


if __name__ == "__main__":
    common.main(make, ["llmcompressor", "compressed-tensors", "auto-round", "transformers"])
