"""Serves a model from a program or a notebook."""

from __future__ import annotations

import threading
from collections.abc import Collection
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from quantkit.api.model import load
from quantkit.serving.address import bind, is_loopback, model_name, url
from quantkit.serving.app import Application, create_app
from quantkit.serving.models import ServedEngine
from quantkit.serving.server import Server


class LocalServer:
    """A server that runs beside the program. :func:`serve` makes one; use it in a ``with``, or close it.

    Attributes:
        url: the address of the chat page; the APIs are below ``/v1``.
        model: the model's name in requests.
    """

    def __init__(self, application: Application, bound: Any, model: str, drain_timeout: float) -> None:
        self.url, self.model = url(bound), model
        self._application, ready = application, threading.Event()
        self._server = Server(application, drain_timeout=drain_timeout, on_ready=ready.set,
                              on_drain=lambda active: None)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [bound]}, daemon=True,
                                        name="quantkit server")
        self._thread.start()
        ready.wait()

    def __repr__(self) -> str:
        return f"<quantkit.LocalServer {self.model} at {self.url}>"

    def __enter__(self) -> LocalServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let running answers finish, and end."""
        self._server.end()
        self._thread.join()
        self._application.close()


def serve(model: str, *, host: str = "127.0.0.1", port: int = 0, name: str | None = None,
          api_keys: Collection[str] = (), allow_hosts: Collection[str] = (), drain_timeout: float = 60.0,
          **options: Any) -> LocalServer:
    """Serve a model with the APIs of OpenAI and Anthropic and a chat page, beside the program.

    ``quantkit serve-local`` is the server for people: it says what memory it will take, serves several
    models and runs replicas.

    Args:
        model: as :func:`quantkit.load` takes it.
        host, port: the address to listen on; one that other machines can reach needs a key; port 0 takes a
            free one.
        name: the model's name in requests; by default the last part of ``model``.
        api_keys: keys of which clients must send one.
        allow_hosts: further host names that clients may use for this server.
        drain_timeout: seconds that running answers have to finish when it is closed.
        options: others of :func:`quantkit.load`: ``kv``, ``draft``, ``device``, ``max_batch`` and more.

    Raises:
        UsageError: the address can't be used, or an option is out of range.
        QuantkitError: the model can't be loaded.

    >>> with quantkit.serve("smollm2", progress=False) as server:
    ...     server.model
    'smollm2'
    """
    called = model_name(model, name)
    with ExitStack() as ends:
        bound = ends.enter_context(bind(host, port, has_key=bool(api_keys)))
        loaded = load(model, **options)
        application = create_app([ServedEngine(loaded.engine, loaded.loaded, called)],
                                 loopback=is_loopback(bound), hosts=(*allow_hosts, host), keys=api_keys)
        loaded.engine.start()
        server = LocalServer(application, bound, called, drain_timeout)
        ends.pop_all()
    return server
