"""AutoRound (signed gradient descent on rounding and ranges) with its own settings, or those asked for.

With ``iters`` 0 and ``plain`` that is rounding to nearest, which needs no text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import common
import torch
from auto_round import AutoRound
from transformers import AutoModelForCausalLM, AutoTokenizer


def make(model: Path, tokens: torch.Tensor | None, spec: dict[str, Any], scratch: Path) -> common.Found:
    """Calibrated, eight windows at a time; without tokens on the text that it takes by itself."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    settings = {"iters": spec.get("iters", 200)}
    settings |= {"lr": spec["lr"]} if "lr" in spec else {}
    settings |= {"disable_opt_rtn": True} if spec.get("plain") else {}
    data: dict[str, Any] = {}
    if tokens is not None:
        settings |= {"batch_size": min(8, len(tokens))}
        rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in tokens]
        data = {"dataset": torch.utils.data.DataLoader(rows, batch_size=1), "nsamples": len(tokens),
                "seqlen": tokens.shape[1]}
    rounding = AutoRound(loaded, tokenizer=tokenizer, bits=spec["bits"], group_size=spec["group"],
                         sym=spec["symmetric"], device_map="cpu", **data, **settings)
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
