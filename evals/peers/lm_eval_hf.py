"""lm-eval's own ``hf`` model beside our runtime on the same items: how often do they choose the same?

``python evals/peers/lm_eval_hf.py --task-data DIR [--tasks arc_easy,piqa] [--limit 200]``. Needs the extras
``lm-eval`` and ``oracle``; two tasks of 200 items take ``hf`` ten minutes in bfloat16 on two
cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import transformers
from lm_eval.models.huggingface import HFLM
from safetensors.torch import save_file

from quantkit.evaluate.lm_eval_model import lm_eval_model
from quantkit.evaluate.tasks import chosen, prepare_tasks
from quantkit.runtime.loader import load
from quantkit.sources.open import open_source


def write(uri: str, folder: Path) -> None:
    """The model as transformers reads it: plain tensors, as the source yields them."""
    source = open_source(uri)
    for name, raw in source.side_files().items():
        (folder / name).write_bytes(raw)
    (folder / "config.json").write_text(json.dumps(source.config()), encoding="utf-8")
    save_file({name: source.tensor(name).clone() for name in source.tensors()}, folder / "model.safetensors",
              metadata={"format": "pt"})
    source.close()


def theirs(folder: Path, dtype: str) -> Any:
    """One request at a time, as lm-eval does unless told otherwise."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    return HFLM(pretrained=model, tokenizer=transformers.AutoTokenizer.from_pretrained(folder), batch_size=1,
                device="cpu")


def choices(results: list[Any], instances: list[Any], metric: str) -> list[int]:
    """The choice of each item, from the log-likelihoods of its options."""
    items: dict[int, tuple[Any, list[Any]]] = {}
    for instance, result in zip(instances, results, strict=True):
        items.setdefault(instance.doc_id, (instance.doc["choices"], []))[1].append(result)
    return [chosen(metric, options, logs) for options, logs in items.values()]


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tasks", default="arc_easy,piqa")
    parser.add_argument("--task-data", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=200)
    args = parser.parse_args()
    tasks = prepare_tasks(args.tasks.split(","), data=args.task_data, limit=args.limit)
    answers_of: dict[tuple[str, str], list[Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(args.model, folder)
        for dtype in ("float32", "bfloat16"):
            for side, make in (("ours", lambda dtype: lm_eval_model(load(args.model, dtype=dtype))),
                               ("hf", lambda dtype: theirs(folder, dtype))):
                model = make(dtype)
                for task in tasks:
                    answers_of[task.file.task, f"{side} {dtype}"] = model.loglikelihood(
                        task.parts[0].instances, disable_tqdm=True)
    for task in tasks:
        name, instances = task.file.task, task.parts[0].instances
        answers = {side: log for (task, side), log in answers_of.items() if task == name}
        for metric in ("acc", "acc_norm"):
            picked = {side: choices(log, instances, metric) for side, log in answers.items()}
            for first, other in combinations(picked, 2):
                same = sum(a == b for a, b in zip(picked[first], picked[other]))
                count = len(picked[first])
                print(f"{name} {metric}: {first} and {other} choose the same in {same} of {count}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
