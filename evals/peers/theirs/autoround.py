"""AutoRound (signed gradient descent on rounding and ranges) with its own settings, or those asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import common
import torch
from auto_round import AutoRound
from transformers import AutoModelForCausalLM, AutoTokenizer


def make(model: Path, tokens: torch.Tensor, spec: dict[str, Any], scratch: Path) -> common.Found:
    """Calibrated, eight windows at a time."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in tokens]
    settings = {"iters": spec.get("iters", 200), "batch_size": min(8, len(rows))}
    settings |= {"lr": spec["lr"]} if "lr" in spec else {}
    rounding = AutoRound(loaded, tokenizer=tokenizer, bits=spec["bits"], group_size=spec["group"],
                         sym=spec["symmetric"], dataset=torch.utils.data.DataLoader(rows, batch_size=1),
                         nsamples=len(tokens), seqlen=tokens.shape[1], device_map="cpu", **settings)
    quantized, _ = rounding.quantize()
    layers = list(common.linears(model))
    weights = {name: module.weight.detach().float().clone() for name, module in quantized.named_modules()
               if name in layers}
    # its own choice for 4 bits without symmetry is a packing that its last release fails to make
    layout = "auto_round" if spec["symmetric"] else "auto_round:auto_gptq"
    rounding.save_quantized(str(scratch), format=layout)
    return weights, common.stored_bits(scratch, layers), settings


if __name__ == "__main__":
    common.main(make, ["auto-round", "transformers"])
