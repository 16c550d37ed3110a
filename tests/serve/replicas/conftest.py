"""A server of two replicas on a Ray cluster of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.processes import marked
from tests.support.server_process import Process

KEY = "sesame-1234"
MARK = "QUANTKIT_TEST_REPLICAS"
"""What all processes of a test's server have in their environment."""
MAX_BATCH = 4


@pytest.fixture(scope="session")
def replicated(folder) -> Iterator[Callable[..., Iterator[Process]]]:
    """``with replicated(mark) as process``: a server of two replicas; killed at the end, if it is there."""
    pytest.importorskip("ray.serve", reason="Ray Serve isn't installed: pip install 'quantkit[ray]'",
                        exc_type=ImportError)

    @contextmanager
    def start(mark: str, model: Path = folder) -> Iterator[Process]:
        process = Process(("--port", 0, model, "--replicas", 2, "--max-batch", MAX_BATCH),
                          OMP_NUM_THREADS="2", QUANTKIT_API_KEY=KEY, **{MARK: mark})
        try:
            yield process
        finally:
            process.child.kill()
            process.child.wait()
            process.child.stdout.close()
            for pid in marked(MARK, mark):
                os.kill(pid, 9)

    yield start
