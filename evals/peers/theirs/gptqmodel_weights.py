"""GPTQModel's methods with its own settings: GPTQ, GPTAQ, FOEM, ParoQuant and rounding to nearest.

``method`` of the spec names one of them, and ``options`` says what of ParoQuant's settings differs. Its
weights are those that its rotations and scales, which a layer applies to its inputs, make of the stored
codes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # by its own count too few on two cores

import common
import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from gptqmodel.quantization.config import FOEMConfig, GPTAQConfig, ParoConfig, RTNConfig
from gptqmodel.utils.paroquant import apply_paroquant_rotation_reference

CORRECTIONS = {"gptaq": lambda: {"gptaq": GPTAQConfig()}, "foem": lambda: {"foem": FOEMConfig()}}
SHOWN = ("desc_act", "act_group_aware", "damp_percent", "opt_rotation_epochs", "opt_finetune_epochs",
         "opt_train_samples", "opt_validation_samples", "opt_batch_size", "krot")


def make(model: Path, tokens: torch.Tensor | None, spec: dict[str, Any], scratch: Path) -> common.Found:
    """Calibrated a window at a time, but for rounding."""
    method = spec["method"]
    config = settings_of(spec)
    loaded = GPTQModel.load(str(model), config)
    rows = None if tokens is None else [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)}
                                        for row in tokens]
    loaded.quantize(rows, batch_size=1, calibration_sort=None)
    loaded.save(str(scratch))
    layers = list(common.linears(model))
    weights = rotated(scratch, layers, spec) if method == "paroquant" else dense(scratch, layers)
    settings = {name: getattr(config, name) for name in SHOWN if hasattr(config, name)}
    return weights, common.stored_bits(scratch, layers), {"method": method, **settings}


def settings_of(spec: dict[str, Any]) -> Any:
    """Its configuration of a method."""
    grid = {"bits": spec["bits"], "group_size": spec["group"], "sym": spec["symmetric"], "device": "cpu"}
    method = spec["method"]
    if method == "rtn":
        return RTNConfig(**grid)
    if method == "paroquant":
        return ParoConfig(**grid, **spec["options"])
    return QuantizeConfig(**grid, act_group_aware=spec["group"] > 0,  # which is of groups
                          **CORRECTIONS.get(method, dict)())


def dense(folder: Path, layers: list[str]) -> dict[str, torch.Tensor]:
    """Weights of a checkpoint in GPTQ's format."""
    opened = GPTQModel.load(str(folder), device="cpu", backend=BACKEND.GPTQ_TORCH, dtype=torch.float16)
    weights = {}
    for name, module in opened.model.named_modules():
        if name in layers:
            module.scales = module.scales.float()
            weights[name] = module.dequantize_weight().T
    return weights


def rotated(folder: Path, layers: list[str], spec: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Weights of a checkpoint in ParoQuant's format, which no kernel of its own runs on a CPU."""
    parts, weights = common.parts_of(folder, layers), {}
    for layer, stored in parts.items():
        scales = stored["scales"].float()
        columns = stored["theta"].shape[-1] * 2
        group = spec["group"] if spec["group"] > 0 else columns
        weight = dequantize_gemm(stored["qweight"], stored["qzeros"], scales, spec["bits"], group)
        inputs = apply_paroquant_rotation_reference(
            torch.eye(columns), stored["pairs"], stored["theta"].float(),
            scales=stored["channel_scales"].float(), group_size=group)
        weights[layer] = (inputs @ weight).T
    return weights


if __name__ == "__main__":
    common.main(make, ["gptqmodel", "transformers"])
