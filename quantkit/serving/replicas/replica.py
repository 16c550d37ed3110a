"""A replica: the server's application with engines of its own, in a process of the cluster."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from starlette.types import Message, Send

from quantkit.plugins.blame import plugin_failure
from quantkit.serving.app import create_app, told_once
from quantkit.serving.errors import api_error
from quantkit.serving.models import ServedEngine
from quantkit.serving.replicas.base import HEADER, REPORT, ForwardedRequest, ReplicaAnswer, ReplicaInfo
from quantkit.serving.replicas.failure import LoadFailure
from quantkit.support.errors import QuantkitError, SourceError

Load = Callable[[], Sequence[ServedEngine]]
MAX_MESSAGES = 256
"""Of an answer that wait to be sent; the application waits while there are more."""


@dataclass(frozen=True)
class ReplicaSetup:
    """How a replica's process is set up.

    Attributes:
        threads: that it computes with.
        environment, path: variables and ``sys.path`` of the server's process.
        loopback: whether it must not be reached from other machines.
        locked: whether the server needs a key, which it checks itself.
    """

    threads: int
    environment: Mapping[str, str]
    path: Sequence[str]
    loopback: bool
    locked: bool


class Replica:
    """What Ray Serve runs in each replica.

    Args:
        load: loads the models.
        setup: of the process.

    Raises:
        LoadFailure: a model can't be loaded, for a reason that a person can act on.
    """

    def __init__(self, load: Load, setup: ReplicaSetup) -> None:
        os.environ.update(setup.environment)
        sys.path.extend(entry for entry in setup.path if entry not in sys.path)
        torch.set_num_threads(setup.threads)
        if setup.loopback:
            _stay_on_loopback()
        import ray
        from ray import serve

        self._id = serve.get_replica_context().replica_id.unique_id
        self._node = ray.util.get_node_ip_address()
        self._errors: list[tuple[str, str | None, str | None]] = []
        self._tell = told_once(self._on_error)
        notes = io.StringIO()
        with contextlib.redirect_stderr(notes):
            try:
                self._models = load()
            except Exception as error:
                failure = plugin_failure(error) or error
                if not isinstance(failure, QuantkitError):
                    raise
                raise LoadFailure.of(failure) from None
        self._notes = notes.getvalue()
        # whoever reaches this process is the server, which has checked host and key
        self._api: Any = create_app(self._models, keys=["checked"] if setup.locked else [],
                                    on_error=self._on_error).api
        gc.freeze()  # what is there stays: collections needn't look through it while answers wait
        for model in self._models:
            model.engine.start()

    def __del__(self) -> None:
        """Called by Ray Serve when the replica is to end."""
        for model in getattr(self, "_models", ()):
            model.engine.close()

    async def info(self) -> ReplicaInfo:
        """What this replica is."""
        try:
            chat = self._models[0].loaded.tokenizer.has_chat
        except SourceError:  # there is a template and it can't be used; a request to chat is told why
            chat = False
        return ReplicaInfo(self._id, os.getpid(), self._node, chat, self._notes)

    async def check_health(self) -> None:
        """Asked by Ray Serve, which replaces a replica that raises.

        Raises:
            RuntimeError: an engine doesn't run any more.
        """
        for model in self._models:
            if model.engine.thread is None or not model.engine.thread.is_alive():
                raise RuntimeError(f"the engine of {model.name} has ended")

    async def get(self, path: str) -> ReplicaAnswer:
        """What the application answers to ``GET path``."""
        scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": []}
        status, body = 0, b""

        async def send(message: Message) -> None:
            nonlocal status, body
            status = message.get("status", status)
            body += message.get("body", b"")

        await self._run(ForwardedRequest(scope, b""), send)
        return ReplicaAnswer(self._id, status, body)

    async def answer(self, request: ForwardedRequest, blocks: Sequence[int] = ()) -> AsyncIterator[
            list[Message]]:
        """ASGI messages of the answer, as many at a time as there are. Cancelling it ends the request.

        Args:
            request: what is asked.
            blocks: for the router alone.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue(MAX_MESSAGES)

        async def run() -> None:
            try:
                await self._run(request, messages.put)
            except Exception:
                await messages.put(None)
                raise
            await messages.put(None)

        running = asyncio.create_task(run())
        try:
            ended = False
            while not ended:
                batch = [await messages.get()]
                while not messages.empty():
                    batch.append(messages.get_nowait())
                ended = batch[-1] is None
                if ended and self._errors:
                    batch.insert(0, {"type": REPORT, "errors": self._errors})
                    self._errors = []
                yield [message for message in batch if message is not None]
            await running
        finally:
            running.cancel()

    async def _run(self, request: ForwardedRequest, write: Send) -> None:
        waiting = [{"type": "http.request", "body": request.body, "more_body": False}]
        started = False

        async def receive() -> Message:
            if waiting:
                return waiting.pop()
            await asyncio.Event().wait()  # a client that leaves cancels this
            raise AssertionError

        async def send(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], (HEADER, self._id.encode())]
            await write(message)

        try:
            await self._api(dict(request.scope), receive, send)
        except Exception as error:
            self._tell(error)
            if not started:
                response = api_error(error).response(request.scope["path"])
                await response(dict(request.scope), receive, send)

    def _on_error(self, error: BaseException) -> None:
        """Keep an error for the server's terminal."""
        if isinstance(failure := plugin_failure(error) or error, QuantkitError):
            self._errors.append((failure.what, failure.why, failure.next))
        else:
            first = str(error).strip().splitlines()[:1]
            self._errors.append((f"internal error: {': '.join([type(error).__name__, *first])}", None, None))


def _stay_on_loopback() -> None:
    """Bind the port of Ray Serve's replica on this machine only. By itself it takes every interface, and
    there is no setting for it."""
    from ray.serve._private import replica

    bind = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: bind(
        server, address.replace("[::]", "127.0.0.1"))
