"""A comparison on a local Ray cluster, a worker of which is killed.

A process of its own, as a cluster that ends can take the process that started it along.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

from quantkit.evaluation.run import evaluate
from quantkit.evaluation.settings import EvalSettings
from quantkit.evaluation.suite import SuiteText
from quantkit.executor import ray as module
from quantkit.support.progress import ProgressEvent
from tests.helpers.processes import marked

MARK = "QUANTKIT_TEST_SWEEP"
SETTINGS = EvalSettings(window=32, windows=3, speed=False, texts=tuple(
    SuiteText(name=name, text=text) for name, text in (
        ("prose", "builtin"), ("german", "builtin:german"), ("dialogue", "builtin:dialogue"))))


def main(models: list[str]) -> None:
    """Compare models and print the result and how many workers were killed."""
    killed: list[int] = []

    def kill(event: ProgressEvent) -> None:
        if not killed and (processes := workers()):
            os.kill(processes[0], signal.SIGKILL)
            killed.append(processes[0])

    torch.set_num_threads(1)
    os.environ[MARK] = str(os.getpid())
    executor = module.RayExecutor(address="local", workers=2)
    result = evaluate(models, SETTINGS, kill, executor="ray")
    executor.close()
    print(json.dumps({"killed": len(killed), "result": result.to_dict()}))


def workers() -> list[int]:
    """Processes of the cluster that do a task."""
    return [process for process in marked(MARK, str(os.getpid()))
            if b"ray::_call" in Path(f"/proc/{process}/cmdline").read_bytes()]


if __name__ == "__main__":
    main(sys.argv[1:])
