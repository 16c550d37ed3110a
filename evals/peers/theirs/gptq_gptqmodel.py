"""GPTQModel with its own settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # by its own count too few on two cores

import common
import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig


def make(model: Path, tokens: torch.Tensor, spec: dict[str, Any], scratch: Path) -> common.Found:
    """Calibrated, a window at a time."""
    config = QuantizeConfig(bits=spec["bits"], group_size=spec["group"], sym=spec["symmetric"], device="cpu",
                            act_group_aware=spec["group"] > 0)  # which is of groups
    loaded = GPTQModel.load(str(model), config)
    rows = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in tokens]
    loaded.quantize(rows, batch_size=1, calibration_sort=None)
    loaded.save(str(scratch))
    opened = GPTQModel.load(str(scratch), device="cpu", backend=BACKEND.GPTQ_TORCH, dtype=torch.float16)
    layers, weights = list(common.linears(model)), {}
    for name, module in opened.model.named_modules():
        if name in layers:
            module.scales = module.scales.float()
            weights[name] = module.dequantize_weight().T
    settings = {"desc_act": config.desc_act, "act_group_aware": config.act_group_aware,
                "damp_percent": config.damp_percent}
    return weights, common.stored_bits(scratch, layers), settings


if __name__ == "__main__":
    common.main(make, ["gptqmodel", "transformers"])
