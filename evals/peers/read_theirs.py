"""Others' checkpoints in quantkit: each is made by the tool's own library and read by quantkit; greedy tokens
and log-probabilities are compared with those of the tool's own engine.

    pip install transformers compressed-tensors bitsandbytes accelerate   (in an environment of its own)
    pip install transformers optimum gptqmodel accelerate                 (in another)
    python evals/peers/read_theirs.py --work DIR --transformers PYTHON --gptq PYTHON [--model tiny|smollm2] \\
        [--only NAME …] [--out FILE]

GPTQModel quantizes by GPTQ (symmetric and not, 8 bits, 3 bits, its version 2, with activation order) and AWQ,
bitsandbytes to NF4 and int8, compressed-tensors to int4, int8 with int8 activations and fp8. The model is a
random Llama of two layers, or SmolLM2. Both sides compute in float32. Of bitsandbytes' int8 and of w8a8 the
other side rounds activations in a way of its own (bitsandbytes leaves outliers as they are, quantkit leaves
all; compressed-tensors simulates max / 127.5), so that their log-probabilities are near and no more.
GPTQModel rounds weights to float16 as it dequantizes them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from commands import plain_folder
from load_exports import PROMPTS, greedy, theirs

from quantkit.runtime.loader import load
from quantkit.support.errors import QuantkitError
from quantkit.testing import tiny_model

GPTQ = """
import json, sys
from gptqmodel import GPTQModel, QuantizeConfig
model, out, settings, calibration = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
quantized = GPTQModel.load(model, QuantizeConfig(**settings), device="cpu")
quantized.quantize([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in calibration],
                   batch_size=1)
quantized.save(out)
"""
BITSANDBYTES = """
import json, sys
import torch, transformers
model, out, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
transformers.AutoModelForCausalLM.from_pretrained(model, local_files_only=True, dtype=torch.float32,
    quantization_config=transformers.BitsAndBytesConfig(**settings)).save_pretrained(out)
"""
COMPRESSED = """
import json, sys
import torch, transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
source, out, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
model = transformers.AutoModelForCausalLM.from_pretrained(source, local_files_only=True, dtype=torch.float32)
config = QuantizationConfig(config_groups={"group_0": {"targets": ["Linear"], **settings}},
                            ignore=["lm_head"])
apply_quantization_config(model, config)
for module in model.modules():
    scheme = getattr(module, "quantization_scheme", None)
    if scheme is not None:
        weight, args = module.weight, scheme.weights
        grouped = weight.view(len(weight), -1, args.group_size or weight.shape[1])
        scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
        module.weight_scale.data = scale.to(module.weight_scale.dtype)
        if getattr(module, "weight_zero_point", None) is not None:
            module.weight_zero_point.data = zero.to(module.weight_zero_point.dtype)
compressor = ModelCompressor.from_pretrained_model(model)
compressor.compress_model(model)
model.save_pretrained(out)
compressor.update_config(out)
"""
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
CHANNEL = {"num_bits": 8, "symmetric": True, "strategy": "channel"}
GROUP = {"num_bits": 4, "symmetric": True, "strategy": "group", "group_size": 32}
MADE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gptq-4": ("gptq", GPTQ, {"bits": 4, "group_size": 32, "desc_act": False}),
    "gptq-4-asym": ("gptq", GPTQ, {"bits": 4, "group_size": 32, "desc_act": False, "sym": False}),
    "gptq-4-v2": ("gptq", GPTQ, {"bits": 4, "group_size": 32, "desc_act": False, "format": "gptq_v2"}),
    "gptq-8": ("gptq", GPTQ, {"bits": 8, "group_size": 32, "desc_act": False}),
    "gptq-3": ("gptq", GPTQ, {"bits": 3, "group_size": 32, "desc_act": False}),
    "gptq-4-desc-act": ("gptq", GPTQ, {"bits": 4, "group_size": 32, "desc_act": True}),
    "awq-4-asym": ("gptq", GPTQ, {"bits": 4, "group_size": 32, "method": "awq", "format": "gemm",
                                  "sym": False}),
    "awq-4": ("gptq", GPTQ, {"bits": 4, "group_size": 32, "method": "awq", "format": "gemm"}),
    "bnb-nf4": ("transformers", BITSANDBYTES, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "bnb-nf4-nested": ("transformers", BITSANDBYTES, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
                                                      "bnb_4bit_use_double_quant": True}),
    "bnb-int8": ("transformers", BITSANDBYTES, {"load_in_8bit": True}),
    "ct-w4a16": ("transformers", COMPRESSED, {"weights": GROUP}),
    "ct-w8a8": ("transformers", COMPRESSED, {"weights": CHANNEL, "input_activations": INT8}),
    "ct-fp8": ("transformers", COMPRESSED, {"weights": CHANNEL | {"type": "float"},
                                            "input_activations": INT8 | {"type": "float"}}),
}
"""Name → whose Python, which script, its settings."""
REFUSED = ("gptq-4-desc-act",)
"""quantkit says why: a row's inputs lie in another order than its groups. compressed-tensors 0.20 makes no
such checkpoint any more (``actorder: group`` is an error there)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", choices=["tiny", "smollm2"])
    parser.add_argument("--work", type=Path, required=True, help="where checkpoints are made; they are kept")
    parser.add_argument("--transformers", type=Path, required=True,
                        help="Python with transformers, compressed-tensors, bitsandbytes")
    parser.add_argument("--gptq", type=Path, required=True,
                        help="Python with transformers, optimum and gptqmodel")
    parser.add_argument("--only", nargs="*", default=list(MADE), choices=list(MADE))
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    plain, rows = original(args), []
    for name in args.only:
        row = {"checkpoint": name, **one(args, plain, name)}
        rows.append(row)
        print(line(row), flush=True)
        if args.out:
            report = {"model": args.model, "tokens": args.max_tokens, "prompts": len(PROMPTS), "rows": rows}
            args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if wrong := [row["checkpoint"] for row in rows if row["read"] == (row["checkpoint"] in REFUSED)]:
        sys.exit(f"not as expected: {', '.join(wrong)}")


def original(args: argparse.Namespace) -> Path:
    """The model as a folder that every tool reads, unless it is there."""
    out: Path = args.work / args.model
    if out.exists():
        return out
    if args.model == "tiny":
        return tiny_model(out, hidden_size=128, intermediate_size=256, tie_word_embeddings=False)
    plain_folder(args.model, out)
    return out


def one(args: argparse.Namespace, plain: Path, name: str) -> dict[str, Any]:
    """Make a checkpoint, run it in its own engine and in quantkit, and compare."""
    python, out = getattr(args, MADE[name][0]), args.work / f"{args.model}-{name}"
    if not out.exists() and (error := make(python, plain, out, name)):
        return {"made": False, "read": None, "error": error}
    try:
        model = load(str(out), dtype="float32")
    except QuantkitError as error:
        return {"made": True, "read": False, "why": " ".join(str(error).split())}
    prompts = [model.tokenizer.encode(text) for text in PROMPTS]
    answers, error = theirs("transformers", python, out, prompts, args.max_tokens)
    row: dict[str, Any] = {"made": True, "read": True, "label": model.label}
    if answers is None:
        return row | {"error": error}
    ours, gaps = greedy(model, prompts, args.max_tokens), []
    for ids, answer in zip(prompts, answers, strict=True):
        logits = model.model(torch.tensor([ids + answer["tokens"]]))[0, len(ids) - 1:-1].float()
        scored = logits.log_softmax(-1)[torch.arange(args.max_tokens), torch.tensor(answer["tokens"])]
        gaps.append((scored - torch.tensor(answer["logprobs"])).abs())
    gap = torch.cat(gaps)
    equal = sum(mine == answer["tokens"] for mine, answer in zip(ours, answers, strict=True))
    return row | {"prompts_with_equal_tokens": equal, "logprob_gap_mean": float(gap.mean()),
                  "logprob_gap_max": float(gap.max())}


def make(python: Path, plain: Path, out: Path, name: str) -> str:
    """Run the tool; what it said if it failed."""
    chance = random.Random(0)
    text = [[chance.randrange(4, 300) for _ in range(64)] for _ in range(16)]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env |= {"HF_HUB_OFFLINE": "1", "GPTQMODEL_CPU_WORKERS": "2"}
    with tempfile.TemporaryDirectory() as place:
        script = Path(place) / "make.py"
        script.write_text(MADE[name][1], encoding="utf-8")
        done = subprocess.run([str(python), str(script), str(plain), str(out), json.dumps(MADE[name][2]),
                               json.dumps(text)], capture_output=True, text=True, check=False, env=env)
    if done.returncode or not (out / "config.json").is_file():
        shutil.rmtree(out, ignore_errors=True)
        return " ".join(done.stderr.split())[-400:]
    for file in plain.iterdir():  # some tools leave out the tokenizer
        if not (out / file.name).exists() and file.suffix != ".safetensors":
            shutil.copy(file, out / file.name)
    return ""


def line(row: dict[str, Any]) -> str:
    """For people."""
    head = f"{row['checkpoint']:20} "
    if not row["made"] or "error" in row:
        return head + f"the tool fails: {row['error']}"
    if not row["read"]:
        return head + f"refused: {row['why']}"
    return head + (f"{row['label']}: equal tokens for {row['prompts_with_equal_tokens']} of {len(PROMPTS)} "
                   f"prompts, log-probability gap {row['logprob_gap_mean']:.6f} "
                   f"(at most {row['logprob_gap_max']:.6f})")


if __name__ == "__main__":
    main()
