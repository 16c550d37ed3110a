"""A cluster that is started here: interrupted while it starts, and killed while it works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from quantkit.executor.cluster import interrupt_deferred
from tests.helpers.processes import marked

MARK = "QUANTKIT_TEST_KILLED"


@pytest.mark.parametrize(("presses", "done"), [(1, ["begun", "done"]), (2, ["begun"])])
def test_ctrl_c_waits_for_the_block_and_a_second_one_doesn_t(presses, done):
    before = signal.getsignal(signal.SIGINT)
    steps = []
    with pytest.raises(KeyboardInterrupt), interrupt_deferred():
        steps.append("begun")
        for _ in range(presses):
            signal.raise_signal(signal.SIGINT)
        steps.append("done")
    assert steps == done and signal.getsignal(signal.SIGINT) is before


def test_another_thread_leaves_signals_alone():
    handlers = []

    def work():
        with interrupt_deferred():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]


def work_on(seconds):
    """Holds a worker without letting Ray have a word."""
    print("works", flush=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


RUN = """
import torch
from quantkit.executor.ray import RayExecutor
from tests.executor.test_cluster import work_on
torch.set_num_threads(1)
list(RayExecutor(address="local", workers=1).map(work_on, [("work", (600,))]))
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray isn't installed")
@pytest.mark.skipif(not Path("/proc/net/tcp6").exists(), reason="processes are read from Linux's /proc")
def test_a_killed_process_leaves_nothing_of_its_cluster(root):
    mark = str(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", RUN], cwd=root, env={**os.environ, MARK: mark})

    def environments():
        for pid in marked(MARK, mark):
            if b"ray::_call" in Path(f"/proc/{pid}/cmdline").read_bytes():
                yield from Path(f"/proc/{pid}/environ").read_text().split("\0")

    deadline = time.monotonic() + 120
    while not (values := dict(line.split("=", 1) for line in environments() if line)):
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    folder = Path(values["RAY_TMPDIR"])
    assert folder.stat().st_mode & 0o777 == 0o700 and len(values["RAY_AUTH_TOKEN"]) == 64
    child.kill()
    child.wait()
    deadline = time.monotonic() + 20
    while marked(MARK, mark) or folder.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
