"""lm-eval's ``local-completions`` against a running server, beside ``quantkit eval`` on the same items.

    quantkit serve-local MODEL
    python evals/serving/clients/lm_eval_completions.py [URL] --model MODEL --task-data DIR --lm-eval PYTHON

PYTHON belongs to an environment with ``pip install "lm-eval[api]" transformers``, where lm-eval's own
program runs: it tokenizes, asks ``/v1/completions`` (with ``echo`` and ``logprobs``, or for a text) and
scores. MODEL is what the server runs, a folder with a tokenizer; ``quantkit eval`` scores it in this
process. DIR has the tasks' data (docs/tasks.md). The two must agree on all but one in fifty items, as the
two group requests differently. The last line is ``N passed, M failed``; exit code 1 if any failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from suite import Suite, server

from quantkit.evaluation.tasks.run import run_tasks
from quantkit.evaluation.tasks.score import PROPORTIONS, TaskScore
from quantkit.runtime.loader import load

TASKS = Path(__file__).resolve().parents[3] / "evals" / "tasks"


def theirs(args: argparse.Namespace, url: str, name: str, task: str, limit: int) -> dict[str, Any]:
    """lm-eval's results of a task. Raises RuntimeError with its last words."""
    options = {"model": name, "base_url": f"{url}/v1/completions", "tokenizer": str(args.model.resolve()),
               "tokenizer_backend": "huggingface", "num_concurrent": 8, "max_length": 4096, "max_retries": 5}
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": folder}
        env.pop("PYTHONPATH", None)
        done = subprocess.run(
            [str(args.lm_eval.absolute()), "-m", "lm_eval", "run", "--model", "local-completions",
             "--model_args", ",".join(f"{key}={value}" for key, value in options.items()),
             "--tasks", str(TASKS / f"{task}.yaml"), "--limit", str(limit), "--output_path", folder],
            cwd=args.task_data, env=env, capture_output=True, text=True, check=False)
        files = sorted(Path(folder).rglob("results_*.json"))
        if done.returncode or not files:
            raise RuntimeError(done.stderr.strip()[-600:])
        results: dict[str, Any] = json.loads(files[0].read_text(encoding="utf-8"))["results"][task]
    return results


def compare(ours: TaskScore, results: dict[str, Any]) -> None:
    """Raises AssertionError if the two differ by more than rounding explains."""
    key = ours.metric if "," in ours.metric else f"{ours.metric},none"
    value = results[key if key in results else next(k for k in results if k.startswith(f"{ours.metric},"))]
    print(f"       {ours.metric}: {value:.4f} through the server, {ours.interval.value:.4f} by quantkit "
          f"eval, {ours.items} items")
    if ours.metric.split(",")[0] in PROPORTIONS:
        assert abs(value - ours.interval.value) <= max(1, ours.items // 50) / ours.items + 1e-9
    else:
        assert abs(value / ours.interval.value - 1) < 0.02


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000")
    parser.add_argument("--model", type=Path, required=True, help="folder of the model that is served")
    parser.add_argument("--task-data", type=Path, required=True)
    parser.add_argument("--lm-eval", type=Path, required=True, metavar="PYTHON")
    parser.add_argument("--tasks", default="copa:100,arc_easy:100,lambada_openai:100,gsm8k:8",
                        help="names and numbers of items")
    args = parser.parse_args()
    sys.argv[1:] = [args.url]
    url, name = server(__doc__)
    suite = Suite("lm-eval local-completions")
    loaded = load(str(args.model))
    for entry in args.tasks.split(","):
        task, _, limit = entry.partition(":")
        results: dict[str, Any] = {}
        with suite.check(f"{task}: lm-eval gets answers to all its requests"):
            results = theirs(args, url, name, task, int(limit))
        if results:
            for score in run_tasks(loaded, [task], data=args.task_data, limit=int(limit)):
                with suite.check(f"{task}: {score.metric}"):
                    compare(score, results)
    return suite.finish()


if __name__ == "__main__":
    sys.exit(main())
