"""lm-eval's own ``hf`` model beside our runtime: do both choose the same, and how many items a second?

``python evals/peers/lm_eval_hf.py --task-data DIR [--tasks arc_easy,piqa] [--limit 200] [--dtypes float32]``.
Needs the extras ``lm-eval`` and ``oracle``. The sides take turns, ``hf`` with every batch size; both get the
same requests, made beforehand, and the same weights. ``--json FILE`` keeps the numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import io
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import transformers
from commands import plain_folder
from lm_eval.models.huggingface import HFLM

from quantkit.evaluation.protocol import cpu_cores, cpu_name
from quantkit.evaluation.tasks.lm_eval_model import lm_eval_model
from quantkit.evaluation.tasks.run import ReadyTask, chosen, prepare_tasks
from quantkit.runtime.loader import load

OURS = "quantkit"


@dataclass
class SideResult:
    """What one side gave for a task: the answers of the last turn, and the seconds of all."""

    answers: list[tuple[float, bool]] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def theirs(folder: Path, dtype: str, batch: str) -> Any:
    """lm-eval's ``hf`` over a folder's model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    return HFLM(pretrained=model, tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
                batch_size=batch if batch == "auto" else int(batch), device="cpu")


def instances_of(task: ReadyTask) -> list[tuple[tuple[int, int], Any]]:
    """``((part, item), request)`` of all requests."""
    return [((number, instance.doc_id), instance) for number, part in enumerate(task.parts)
            for instance in part.instances]


def decisions(task: ReadyTask, answers: list[tuple[float, bool]], metric: str) -> list[int]:
    """Of each item, the option that a metric takes; without options whether greedy decoding answers right."""
    items: dict[tuple[int, int], tuple[Any, list[tuple[float, bool]]]] = {}
    for (item, instance), answer in zip(instances_of(task), answers, strict=True):
        items.setdefault(item, (instance.doc, []))[1].append(answer)
    return [chosen(metric, doc["choices"], logs) if "choices" in doc else int(logs[0][1])
            for doc, logs in items.values()]


def scored(task: ReadyTask) -> list[str]:
    """The metrics that choose something."""
    return [entry.metric for entry in task.file.metric_list if entry.metric != "perplexity"]


def measure(sides: dict[str, Any], tasks: list[ReadyTask], turns: int) -> dict[tuple[str, str], SideResult]:
    """Let the sides take turns on every task; what each says to a terminal is dropped."""
    measured: dict[tuple[str, str], SideResult] = {}
    for task in tasks:
        requests = [instance for _, instance in instances_of(task)]
        for turn in range(turns):
            for name, model in sorted(sides.items(), reverse=bool(turn % 2)):
                side = measured.setdefault((task.file.task, name), SideResult())
                before = time.perf_counter(), time.process_time()
                with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                    side.answers = model.loglikelihood(requests, disable_tqdm=True)
                side.wall.append(time.perf_counter() - before[0])
                side.cpu.append(time.process_time() - before[1])
                print(f"{task.file.task}, {name}: {side.wall[-1]:.1f} s, {side.cpu[-1]:.1f} s of CPU",
                      file=sys.stderr, flush=True)
    return measured


def compared(task: ReadyTask, dtype: str, measured: dict[tuple[str, str], SideResult]) -> dict[str, Any]:
    """A task's numbers: our side, and ``hf`` with the batch size that was the fastest."""
    sides = {name: side for (of, name), side in measured.items() if of == task.file.task}
    ours = sides.pop(OURS)
    best = min(sides, key=lambda name: min(sides[name].wall))
    same = {metric: sum(first == other for first, other in zip(
        decisions(task, ours.answers, metric), decisions(task, sides[best].answers, metric)))
        for metric in scored(task)}
    apart = [abs(first[0] - other[0]) for first, other in zip(ours.answers, sides[best].answers)]
    return {"task": task.file.task, "dtype": dtype, "items": task.items, "requests": len(apart), "same": same,
            "largest_difference": max(apart), "hf_batch": best.removeprefix("hf batch "),
            "wall_s": {OURS: ours.wall, **{name: side.wall for name, side in sides.items()}},
            "cpu_s": {OURS: ours.cpu, **{name: side.cpu for name, side in sides.items()}}}


def agreements(tasks: list[ReadyTask], answers: dict[tuple[str, str], list[tuple[float, bool]]]
               ) -> Iterator[dict[str, Any]]:
    """How often any two sides, in any dtypes, choose the same."""
    for task in tasks:
        of_task = {side: logs for (name, side), logs in answers.items() if name == task.file.task}
        for metric in scored(task):
            picked = {side: decisions(task, logs, metric) for side, logs in of_task.items()}
            for first, other in combinations(picked, 2):
                same = sum(a == b for a, b in zip(picked[first], picked[other]))
                yield {"task": task.file.task, "metric": metric, "sides": [first, other], "same": same,
                       "items": task.items}


def table(rows: list[dict[str, Any]]) -> str:
    """The numbers as markdown. Ratios are of the same turn: the least and the greatest."""
    lines = ["| task | dtype | items | same choice | largest Δ log-likelihood | quantkit, items/s | "
             "hf, items/s (batch) | ratio | ratio of CPU time |", "|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        hf = f"hf batch {row['hf_batch']}"
        same = ", ".join(f"{metric} {count / row['items']:.1%}" for metric, count in row["same"].items())
        ratios = [sorted(b / a for a, b in zip(row[kind][OURS], row[kind][hf]))
                  for kind in ("wall_s", "cpu_s")]
        ours, theirs = (row["items"] / min(row["wall_s"][name]) for name in (OURS, hf))
        ranges = [f"{ratio[0]:.1f}–{ratio[-1]:.1f}" if len(ratio) > 1 else f"{ratio[0]:.1f}"
                  for ratio in ratios]
        lines.append(f"| {row['task']} | {row['dtype']} | {row['items']} | {same} | "
                     f"{row['largest_difference']:.1e} | {ours:.1f} | {theirs:.1f} ({row['hf_batch']}) | "
                     f"{ranges[0]} | {ranges[1]} |")
    return "\n".join(lines)


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tasks", default="arc_easy,piqa")
    parser.add_argument("--task-data", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--dtypes", default="float32")
    parser.add_argument("--hf-batch", default="32", help="batch sizes of hf, such as 8,32,auto")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    tasks = prepare_tasks(args.tasks.split(","), data=args.task_data, limit=args.limit)
    rows: list[dict[str, Any]] = []
    answers: dict[tuple[str, str], list[tuple[float, bool]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        plain_folder(args.model, folder)
        for dtype in args.dtypes.split(","):
            sides = {f"hf batch {batch}": theirs(folder, dtype, batch) for batch in args.hf_batch.split(",")}
            sides[OURS] = lm_eval_model(load(args.model, dtype=dtype))
            for model in sides.values():  # kernels are compiled, and memory is there
                model.loglikelihood(tasks[0].parts[0].instances[:8], disable_tqdm=True)
            measured = measure(sides, tasks, args.turns)
            rows += [compared(task, dtype, measured) for task in tasks]
            for row in rows[-len(tasks):]:
                for name in (OURS, f"hf batch {row['hf_batch']}"):
                    answers[row["task"], f"{name} {dtype}"] = measured[row["task"], name].answers
            sides.clear()
            gc.collect()
    same = list(agreements(tasks, answers))
    if args.json:
        about = {"date": datetime.date.today().isoformat(),
                 "machine": {"cpu": cpu_name(), "cores": cpu_cores(), "threads": torch.get_num_threads()},
                 "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
                 "model": args.model}
        args.json.write_text(json.dumps({**about, "rows": rows, "agreements": same}, indent=1) + "\n",
                             encoding="utf-8")
    print(table(rows))
    for pair in same if len(args.dtypes.split(",")) > 1 else ():
        print(f"{pair['task']} {pair['metric']}: {' and '.join(pair['sides'])} choose the same in "
              f"{pair['same']} of {pair['items']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
