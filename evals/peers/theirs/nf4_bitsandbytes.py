"""bitsandbytes' NF4 in blocks of 64: a float32 scale a block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import common
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from safetensors.torch import load_file


def make(model: Path, tokens: torch.Tensor | None, spec: dict[str, Any], scratch: Path) -> common.Found:
    """Data-free."""
    tensors = load_file(model / "model.safetensors")
    weights = {}
    bits = 0
    for layer in common.linears(model):
        codes, state = quantize_4bit(tensors[f"{layer}.weight"], blocksize=64, quant_type="nf4",
                                     compress_statistics=False)
        bits += 8 * (codes.nbytes + state.absmax.nbytes + state.code.nbytes)
        state.dtype = torch.float32
        weights[layer] = dequantize_4bit(codes, state)
    return weights, bits, {"blocksize": 64}


if __name__ == "__main__":
    common.main(make, ["bitsandbytes"])
