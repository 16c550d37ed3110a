"""Real servers over a tiny model, each on a thread and a port of its own."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
import torch

from quantkit.runtime.engine import Engine
from quantkit.runtime.loader import LoadedModel, load
from quantkit.serve.address import bind, url
from quantkit.serve.app import Application, create_app
from quantkit.serve.server import Server
from quantkit.testing import tiny_model

CONTEXT = 2**16
DEADLINE = 60.0
"""Seconds that a test waits for what should come at once; nothing is measured."""


@dataclass
class Live:
    """A running server."""

    url: str
    engine: Engine
    application: Application
    loaded: LoadedModel
    server: Server
    errors: list[BaseException]
    loop: asyncio.AbstractEventLoop

    @property
    def http(self) -> httpx.Client:
        """A plain client."""
        return httpx.Client(base_url=self.url, timeout=DEADLINE)

    def openai(self, **options: Any) -> openai.OpenAI:
        """The official client, which never tries again."""
        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0,
                                                           "timeout": DEADLINE, **options})

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """A JSON body to a path; ``model`` is filled in."""
        if isinstance(body, dict):
            body = {"model": "tiny", **body}
        with self.http as client:
            return client.post(path, json=body, **options)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A two-layer Llama in float32 with a long context. Tests don't write to it."""
    return tiny_model(tmp_path_factory.mktemp("serve") / "tiny", dtype="float32",
                      max_position_embeddings=CONTEXT)


@pytest.fixture(scope="session")
def loaded(folder) -> LoadedModel:
    """The same, loaded; one thread, because other processes may want the rest."""
    torch.set_num_threads(1)
    return load(str(folder))


@contextmanager
def running(loaded: LoadedModel, *, name: str = "tiny", host: str = "127.0.0.1", max_batch: int = 8,
            max_queue: int = 64, **options: Any) -> Iterator[Live]:
    engine, errors = Engine(loaded, max_batch=max_batch, max_queue=max_queue), []
    application = create_app(engine, loaded, name=name, on_error=errors.append, **options)
    loops: queue.Queue[asyncio.AbstractEventLoop] = queue.Queue()
    with bind(host, 0, has_key="key" in options) as bound:
        server = Server(application, engine, drain_timeout=DEADLINE, on_drain=lambda active: None,
                        on_ready=lambda: loops.put(asyncio.get_running_loop()))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        engine.start()
        thread.start()
        try:
            yield Live(url(bound), engine, application, loaded, server, errors, loops.get(timeout=DEADLINE))
        finally:
            engine.close()
            server.should_exit = True
            thread.join(DEADLINE)
    assert not thread.is_alive()


@pytest.fixture
def live(loaded) -> Iterator[Callable[..., Live]]:
    """``live(key=…, max_batch=…)`` → a server that ends with the test."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(running(options.pop("loaded", loaded), **options))


@pytest.fixture(scope="session")
def shared(loaded) -> Iterator[Live]:
    """A server for tests that leave nothing behind."""
    with running(loaded) as made:
        yield made


@pytest.fixture
def eventually() -> Callable[[Callable[[], Any]], None]:
    """Wait until something holds."""

    def wait(holds: Callable[[], Any]) -> None:
        end = time.monotonic() + DEADLINE
        while not holds():
            assert time.monotonic() < end, "it never came true"
            time.sleep(0.01)

    return wait
