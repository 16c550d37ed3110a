"""A twin of a model that computes the same from other weights, for models that come from a quantized file.

    python evals/peers/off_grid.py MODEL TWIN [--seed 0]

A model that was read from a 4-bit file lies on that file's grid: whoever quantizes it to the same grid makes
no error, and a comparison below about 6 bits says nothing. The twin's weights are off every grid. The inputs
of q, k and v, of o, of gate and up, and of down are divided by random factors between 0.8 and 1.25, which the
norm before, v and up undo; heads that share a v share its factors. TWIN is a folder in bfloat16 that
quantkit, transformers, OpenVINO and vLLM read, and TWIN.gguf has the same numbers for llama.cpp: all quantize
the same. Before it is rounded to bfloat16, the twin's logits are checked against the model's in float32.
Models of Llama's structure (Llama, Mistral, Qwen2, SmolLM2), and Gemma 3.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from commands import plain_folder, quantkit
from transformers import AutoModelForCausalLM

SPREAD = 1.25
TOLERANCE = 1e-4
"""Largest difference of a logit, as a share of the largest logit."""
PARTS = {"input_layernorm", "post_attention_layernorm", "self_attn", "mlp"}
SANDWICH = PARTS | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
"""Of a Gemma: norms come before and behind attention and MLP, and multiply by their weights and 1."""


@torch.inference_mode()
def rescale(model: Any, seed: int) -> None:
    """Make a model of Llama's structure its own twin, in place. Raises ValueError for another structure."""
    chance = torch.Generator().manual_seed(seed)
    for layer in model.model.layers:
        parts = {name for name, _ in layer.named_children()}
        if parts not in (PARTS, SANDWICH):
            raise ValueError(f"a layer of {sorted(parts)}, not of {sorted(PARTS)}")
        attention, mlp, offset = layer.self_attn, layer.mlp, float(parts == SANDWICH)
        before_mlp = layer.pre_feedforward_layernorm if offset else layer.post_attention_layernorm
        for norm, readers in ((layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                              (before_mlp, (mlp.gate_proj, mlp.up_proj))):
            factors = _factors(len(norm.weight), chance)
            norm.weight.copy_((norm.weight + offset) * factors - offset)
            for linear in readers:
                linear.weight /= factors
        for writer, reader in ((attention.v_proj, attention.o_proj), (mlp.up_proj, mlp.down_proj)):
            factors = _factors(len(writer.weight), chance)
            writer.weight *= factors[:, None]
            if writer.bias is not None:
                writer.bias *= factors
            shared = reader.in_features // writer.out_features  # heads that read one head of v
            dim = attention.head_dim if shared > 1 else len(factors)
            reader.weight /= factors.view(-1, 1, dim).expand(-1, shared, -1).flatten()


def _factors(count: int, chance: torch.Generator) -> torch.Tensor:
    """Between 1 / SPREAD and SPREAD, evenly on a logarithmic scale: float32 ``[count]``."""
    return SPREAD ** (2 * torch.rand(count, generator=chance) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("model", help="anything that quantkit opens")
    parser.add_argument("twin", type=Path, help="the folder to make")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.twin.parent) as place:
        plain = Path(place)
        plain_folder(args.model, plain)
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
        ids = torch.randint(0, model.config.vocab_size, (2, 64), generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            before = model(ids).logits
            rescale(model, args.seed)
            difference = float((model(ids).logits - before).abs().max() / before.abs().max())
        if not difference < TOLERANCE:
            sys.exit(f"the twin's logits differ by {difference:.1e} of the largest")
        args.twin.mkdir()
        for file in plain.iterdir():
            if file.suffix != ".safetensors":
                shutil.copy(file, args.twin)
        model.bfloat16().save_pretrained(args.twin)
    quantkit("export", str(args.twin), "--to", "gguf", f"{args.twin}.gguf")
    print(f"{args.twin} and {args.twin}.gguf: logits equal to {difference:.1e} of the largest before "
          "rounding to bfloat16")


if __name__ == "__main__":
    main()
