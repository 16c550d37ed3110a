"""A comparison on a local Ray cluster, a worker of which is killed."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path

import pytest
import torch

from quantkit.evaluate.run import evaluate
from quantkit.evaluate.settings import EvalSettings
from quantkit.evaluate.suite import SuiteText
from quantkit.executor import ray as module
from tests.support.processes import marked

MARK = "QUANTKIT_TEST_SWEEP"
SETTINGS = EvalSettings(window=32, windows=3, speed=False, texts=tuple(
    SuiteText(name=name, text=text) for name, text in (
        ("prose", "builtin"), ("german", "builtin:german"), ("dialogue", "builtin:dialogue"))))


@pytest.fixture
def cluster():
    """Two workers with a CPU each on this machine, whose processes have :data:`MARK`."""
    pytest.importorskip("ray")
    if not Path("/proc/self/environ").exists():
        pytest.skip("the cluster's processes are found in Linux's /proc")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    os.environ[MARK] = str(os.getpid())
    executor = module.RayExecutor(address="local", workers=2)
    yield
    executor.close()
    del os.environ[MARK]
    torch.set_num_threads(threads)


def workers() -> list[int]:
    """Processes of the cluster that do a task."""
    return [process for process in marked(MARK, str(os.getpid()))
            if b"ray::_call" in Path(f"/proc/{process}/cmdline").read_bytes()]


def test_a_killed_worker_costs_nothing(cluster, tiny, int8, int4):
    models, killed = [str(tiny), str(int8), str(int4)], []

    def kill(event):
        if not killed and (processes := workers()):
            os.kill(processes[0], signal.SIGKILL)
            killed.append(processes[0])

    result = evaluate(models, SETTINGS, kill, executor="ray")
    assert killed, "no worker was found to be killed"
    alone = evaluate(models, dataclasses.replace(SETTINGS))
    for ours, theirs in zip(result.rows, alone.rows, strict=True):
        assert ours.metrics == theirs.metrics and ours.window_means == theirs.window_means
