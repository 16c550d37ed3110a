"""lm-eval's own ``hf`` model beside quantkit: do both choose the same, and how many items a second?

    python evals/peers/tasks.py FOLDER --task-data DIR --out FILE [--tasks arc_easy,piqa] [--limit 16]
        [--parts 2] [--dtype bfloat16] [--batches 8,32] [--turns 2]

FOLDER is a model in bfloat16 that both read. Both get the same requests, made beforehand, and take turns in
one process; ``hf`` has every batch size of ``--batches``, and the table shows its best. ``--parts`` keeps the
first parts of a task alone, such as subjects of MMLU: items of one subject share their examples. With each
row stands the read bandwidth just before it. Needs ``pip install lm-eval transformers``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantkit.evaluation.protocol import machine
from quantkit.evaluation.roofline.ceilings import cpu_ceilings
from quantkit.evaluation.tasks.lm_eval_model import lm_eval_model
from quantkit.evaluation.tasks.run import ReadyTask, chosen, prepare_tasks
from quantkit.runtime.loader import load

OURS = "quantkit"
Answers = list[tuple[float, bool]]
"""Of each request the continuation's log-likelihood, and whether it is the greedy one."""


def measure(sides: dict[str, Any], task: ReadyTask, turns: int) -> dict[str, Any]:
    """A row: each side's seconds, a turn each, and how often the sides choose the same option."""
    requests = [instance for part in task.parts for instance in part.instances]
    row: dict[str, Any] = {"task": task.file.task, "parts": len(task.parts), "items": task.items,
                           "requests": len(requests), "read_bytes_s": cpu_ceilings().read()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    answers: dict[str, Answers] = {}
    for turn in range(turns):
        for name, model in sorted(sides.items(), reverse=bool(turn % 2)):
            began = time.perf_counter()
            with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                answers[name] = model.loglikelihood(requests, disable_tqdm=True)
            seconds[name].append(time.perf_counter() - began)
            print(f"{task.file.task}, {name}: {seconds[name][-1]:.1f} s", file=sys.stderr, flush=True)
    best = min((name for name in sides if name != OURS), key=lambda name: min(seconds[name]))
    pairs = zip(choices(task, answers[OURS]), choices(task, answers[best]), strict=True)
    return row | {"seconds": seconds, "best": best, "same": sum(ours == theirs for ours, theirs in pairs)}


def choices(task: ReadyTask, answers: Answers) -> list[int]:
    """The likeliest option of each item."""
    items: dict[tuple[int, int], tuple[Any, Answers]] = {}
    instances = [(number, instance) for number, part in enumerate(task.parts) for instance in part.instances]
    for (number, instance), answer in zip(instances, answers, strict=True):
        items.setdefault((number, instance.doc_id), (instance.doc, []))[1].append(answer)
    return [chosen("acc", doc["choices"], logs) for doc, logs in items.values()]


def line(row: dict[str, Any]) -> str:
    """A row of the table by each side's fastest turn; the ratio is of turns, the least and the greatest."""
    ours, theirs = row["seconds"][OURS], row["seconds"][row["best"]]
    ratios = sorted(b / a for a, b in zip(ours, theirs, strict=True))
    parts = f", {row['parts']} parts" if row["parts"] > 1 else ""
    return (f"| `{row['task']}`{parts} | {row['items']} | {row['same']} | {row['items'] / min(ours):.2f}/s | "
            f"{row['items'] / min(theirs):.2f}/s | {ratios[0]:.1f}–{ratios[-1]:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("folder")
    parser.add_argument("--task-data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", default="arc_easy,piqa")
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--parts", type=int)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batches", default="8,32")
    parser.add_argument("--turns", type=int, default=2)
    args = parser.parse_args()
    tasks = prepare_tasks(args.tasks.split(","), data=args.task_data, limit=args.limit)
    if args.parts:
        tasks = [replace(task, parts=(parts := task.parts[:args.parts]),
                         items=sum(1 for part in parts for _ in part.doc_iterator())) for task in tasks]
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=getattr(torch, args.dtype)).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    sides: dict[str, Any] = {f"hf, batch {size}": HFLM(pretrained=model, tokenizer=tokenizer, device="cpu",
                                                       batch_size=int(size))
                             for size in args.batches.split(",")}
    sides[OURS] = lm_eval_model(load(args.folder, dtype=args.dtype))
    for side in sides.values():  # kernels are compiled and pages are read before anything is timed
        side.loglikelihood(tasks[0].parts[0].instances[:4], disable_tqdm=True)
    report = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {
        "machine": machine(), "model": Path(args.folder).name, "dtype": args.dtype,
        "threads": torch.get_num_threads(), "rows": []}
    for task in tasks:
        report["rows"].append(measure(sides, task, args.turns))
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print("| task | items | same choice | quantkit | `hf` | ratio |\n|---|--:|--:|--:|--:|--:|")
    print("\n".join(line(row) for row in report["rows"]))


if __name__ == "__main__":
    main()
