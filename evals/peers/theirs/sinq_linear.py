"""SINQ: rows and columns of a weight are scaled by Sinkhorn-like iterations until their standard deviations
agree, and then rounded to nearest.

``method`` names its variant: ``sinq``, the one that its documentation recommends, stores scales and zeros
in 8 bits, ``sinq_dual`` in float16. A layer has a scale and a zero point for each group of a row, and a scale
for each column. Layers of high kurtosis are rounded without column scales; that is its own choice.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ["SINQ_AUTO_PATCH"] = "0"  # transformers is not needed here

import common
import torch
from safetensors.torch import load_file
from sinq.quantizer import Quantizer, dq8
from sinq.sinqlinear import BaseQuantizeConfig, SINQLinear


def make(model: Path, tokens: torch.Tensor | None, spec: dict[str, Any], scratch: Path) -> common.Found:
    tensors = load_file(model / "model.safetensors")
    weights = {}
    bits = 0
    for layer, (rows, columns) in common.linears(model).items():
        config = BaseQuantizeConfig(nbits=spec["bits"], tiling_mode="1D", method=spec["method"],
                                    group_size=None if spec["group"] < 0 else spec["group"])
        linear = torch.nn.Linear(columns, rows, bias=False)
        linear.weight.data = tensors[f"{layer}.weight"].float()
        quantized = SINQLinear(linear, config, compute_dtype=torch.float16, device="cpu", del_orig=False)
        meta = quantized.meta
        bits += 8 * quantized.W_q.nbytes + sum(stored(meta[part]) for part in ("scale", "zero", "scale2"))
        exact = {part: restored(meta[part]) for part in ("scale", "zero", "scale2")}
        weights[layer] = Quantizer.dequantize(quantized.W_q, meta | exact | {
            "method": meta["method"].replace("_quantAux", ""), "compute_dtype": torch.float32})
    return weights, bits, {"method": spec["method"], "axis": 1}


def stored(part: Any) -> int:
    """Bits of scales or zero points: plain ones in float16, or 8 bits with ranges in float16."""
    if isinstance(part, torch.Tensor):
        return 16 * part.numel()
    codes, scale, low, _ = part
    return 8 * codes.numel() + 16 * (scale.numel() + low.numel())


def restored(part: Any) -> torch.Tensor:
    """The same in float32, as far as what is stored goes."""
    if isinstance(part, torch.Tensor):
        return part.half().float()
    codes, scale, low, shape = part
    return dq8((codes, scale.half().float(), low.half().float(), shape))


if __name__ == "__main__":
    common.main(make, ["sinq"])
