"""HQQ with its own settings: zero points by half-quadratic optimization, float16 scales and zeros."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import common
import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer
from safetensors.torch import load_file


def make(model: Path, tokens: torch.Tensor | None, spec: dict[str, Any], scratch: Path) -> common.Found:
    tensors = load_file(model / "model.safetensors")
    weights = {}
    bits = 0
    group = None if spec["group"] < 0 else spec["group"]
    config = BaseQuantizeConfig(nbits=spec["bits"], group_size=group, axis=1)
    for layer, (rows, columns) in common.linears(model).items():
        linear = torch.nn.Linear(columns, rows, bias=False)
        linear.weight.data = tensors[f"{layer}.weight"].float()
        quantized = HQQLinear(linear, config, compute_dtype=torch.float16, device="cpu", del_orig=False)
        bits += 8 * (quantized.W_q.nbytes + quantized.meta["scale"].nbytes + quantized.meta["zero"].nbytes)
        exact = quantized.meta | {"scale": quantized.meta["scale"].float(),
                                  "zero": quantized.meta["zero"].float(), "compute_dtype": torch.float32}
        weights[layer] = Quantizer.dequantize(quantized.W_q, exact)
    return weights, bits, {"axis": 1}


if __name__ == "__main__":
    common.main(make, ["hqq"])
