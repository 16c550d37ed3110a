"""Serves a model from a program or a notebook."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from quantkit.api.model import load
from quantkit.serving.address import bind, check_keys, is_loopback, model_name, url
from quantkit.serving.app import Application, create_app
from quantkit.serving.models import ServedEngine
from quantkit.serving.server import Server

MAX_QUEUE = 64
"""Requests that wait; others are told to try again."""
MAX_ITL = 0.05
"""Seconds between two tokens of an answer while another's prompt is read."""


class LocalServer:
    """A server that runs beside the program. :func:`serve` makes one; use it in a ``with``, or close it.

    Attributes:
        url: the address of the chat page; the APIs are below ``/v1``.
        model: the model's name in requests.
    """

    def __init__(self, application: Application, bound: Any, model: str, drain_timeout: float) -> None:
        self.url, self.model = url(bound), model
        self._application, begun = application, threading.Event()
        self._server = Server(application, drain_timeout=drain_timeout, on_ready=begun.set,
                              on_drain=lambda active: None)

        def run() -> None:
            try:
                self._server.run(sockets=[bound])
            finally:
                begun.set()  # it may have ended before it was ready

        self._thread = threading.Thread(target=run, daemon=True, name="quantkit-server")
        self._thread.start()
        begun.wait()

    def __repr__(self) -> str:
        return f"<quantkit.LocalServer {self.model} at {self.url}>"

    def __enter__(self) -> LocalServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let running answers finish, and end."""
        try:
            if self._thread.is_alive():
                self._server.end()
                self._thread.join()
        finally:
            self._application.close()


def serve(model: str, *, host: str = "127.0.0.1", port: int = 0, name: str | None = None,
          api_keys: Sequence[str] = (), allow_hosts: Sequence[str] = (), drain_timeout: float = 60.0,
          **options: Any) -> LocalServer:
    """Serve a model with the APIs of OpenAI and Anthropic and a chat page, beside the program.

    ``quantkit serve-local`` is the server for people: it says what memory it will take, serves several
    models and runs replicas.

    Args:
        model: as :func:`quantkit.load` takes it.
        host: the address to listen on; one that other machines can reach needs a key.
        port: the port to listen on; 0 takes a free one.
        name: the model's name in requests; by default the last part of ``model``.
        api_keys: keys of which clients must send one.
        allow_hosts: further host names that clients may use for this server.
        drain_timeout: seconds that running answers have to finish when it is closed.
        options: others of :func:`quantkit.load`: ``kv``, ``draft``, ``device``, ``max_batch`` and more; by
            default at most 64 requests wait, and prompts are cut so that others get a token every 50 ms.

    Raises:
        UsageError: the address can't be used, or an option is out of range.
        QuantkitError: the model can't be loaded.

    >>> with quantkit.serve("smollm2", progress=False) as server:
    ...     server.model
    'smollm2'
    """
    called = model_name(model, name)
    keys, hosts = ([given] if isinstance(given, str) else list(given) for given in (api_keys, allow_hosts))
    if keys:
        check_keys(keys, "api_keys")
    with ExitStack() as ends:
        bound = ends.enter_context(bind(host, port, has_key=bool(keys)))
        loaded = load(model, **{"max_queue": MAX_QUEUE, "max_itl": MAX_ITL, **options})
        application = create_app([ServedEngine(loaded.engine, loaded.loaded, called)],
                                 loopback=is_loopback(bound), hosts=(*hosts, host), keys=keys,
                                 on_error=traceback.print_exception)
        ends.callback(application.close)
        loaded.engine.start()
        server = LocalServer(application, bound, called, drain_timeout)
        ends.pop_all()
    return server
