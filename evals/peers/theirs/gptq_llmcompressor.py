"""llm-compressor's GPTQ with static activation order, its default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import common
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

FORMAT = "pack-quantized"


def make(model: Path, tokens: torch.Tensor, spec: dict[str, Any], scratch: Path) -> common.Found:
    """Calibrated, a window at a time."""
    group = spec["group"]
    grid = {"strategy": "group", "group_size": group} if group > 0 else {"strategy": "channel"}
    args = QuantizationArgs(num_bits=spec["bits"], type="int", symmetric=spec["symmetric"], **grid)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=FORMAT)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto", local_files_only=True)
    rows = {"input_ids": tokens.tolist(), "attention_mask": torch.ones_like(tokens).tolist()}
    oneshot(model=loaded, dataset=Dataset.from_dict(rows), num_calibration_samples=len(tokens),
            max_seq_length=tokens.shape[1], shuffle_calibration_samples=False,
            recipe=GPTQModifier(config_groups={"all": scheme}, ignore=["lm_head"], actorder="static"))
    loaded.save_pretrained(scratch, save_compressed=True)
    layers = list(common.linears(model))
    saved = {name: tensor for shard in scratch.glob("*.safetensors")
             for name, tensor in load_file(shard).items()}
    compressor, weights = BaseCompressor.get_value_from_registry(FORMAT), {}
    for layer in layers:
        parts = {name.rpartition(".")[2]: tensor for name, tensor in saved.items()
                 if name.rpartition(".")[0] == layer}
        parts["weight_scale"] = parts["weight_scale"].float()  # or products are rounded to its dtype
        weights[layer] = compressor.decompress(parts, scheme)["weight"]
    settings = {"actorder": "static", "dampening_frac": GPTQModifier().dampening_frac}
    return weights, common.stored_bits(scratch, layers), settings


if __name__ == "__main__":
    common.main(make, ["llmcompressor", "compressed-tensors", "transformers"])
