"""A server of two replicas on a Ray cluster of this machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from quantkit.runtime.generate import generate
from quantkit.runtime.sampler import Sampling
from tests.helpers.processes import marked
from tests.helpers.server_process import Process

KEY = "sesame-1234"
MARK = "QUANTKIT_TEST_REPLICAS"
"""What all processes of a test's server have in their environment."""
MAX_BATCH = 4


def chat(*texts):
    """A conversation of a user and an assistant."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def greedy(loaded, messages, count):
    """What the model answers, by itself."""
    ids = loaded.tokenizer.chat(messages)
    return generate(loaded, [ids], Sampling(max_tokens=count))[0].text


@pytest.fixture(scope="session")
def replicated(folder) -> Iterator[Callable[..., Iterator[Process]]]:
    """``with replicated(mark) as process``: a server of two replicas; killed at the end, if it is there."""
    if not Path("/proc/net/tcp6").exists():
        pytest.skip("processes are read from Linux's /proc")
    if not find_spec("ray"):  # it isn't imported: servers do that
        pytest.skip("Ray isn't installed: pip install ray")

    @contextmanager
    def start(mark: str, *options: object, model: Path = folder) -> Iterator[Process]:
        try:
            with Process(("--port", 0, model, "--replicas", 2, "--max-batch", MAX_BATCH, *options),
                         OMP_NUM_THREADS="2", QUANTKIT_API_KEY=KEY, **{MARK: mark}) as process:
                yield process
        finally:
            deadline = time.monotonic() + 10  # a killed server's processes end by themselves
            while marked(MARK, mark) and time.monotonic() < deadline:
                time.sleep(0.1)
            for pid in marked(MARK, mark):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    yield start
