"""A replica: the server's application with engines of its own, in a process of the cluster; and what the
server's process and a replica say to each other."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import Message, Send

from quantkit.executor.cluster import WorkerSetup
from quantkit.plugins.blame import plugin_failure
from quantkit.serving.app import create_app, told_once
from quantkit.serving.errors import api_error
from quantkit.serving.models import ServedEngine
from quantkit.support.errors import QuantkitError, SourceError

Load = Callable[[], Sequence[ServedEngine]]
HEADER = b"x-quantkit-replica"
"""Header of an answer that names the replica that gave it."""
REPORT = "quantkit.report"
"""Type of a message among ASGI's, with errors that the server's terminal is told of."""
MAX_MESSAGES = 256
"""Of an answer that wait to be sent; the application waits while there are more."""
CHECK_SECONDS = 2.0
"""That a replica takes to say that it is well."""


@dataclass(frozen=True)
class ForwardedRequest:
    """An HTTP request on its way to a replica: ASGI's scope without what belongs to the server's process, and
    the body."""

    scope: Mapping[str, Any]
    body: bytes


@dataclass(frozen=True)
class ReplicaInfo:
    """A replica that has loaded its models.

    Attributes:
        id: The name that answers have in :data:`HEADER`.
        pid: The id of its process.
        node: The address of its machine in the cluster.
        chat: Whether the first model has a chat template.
        notes: The lines on stderr while it loaded.
    """

    id: str
    pid: int
    node: str
    chat: bool
    notes: str


@dataclass(frozen=True)
class ReplicaAnswer:
    """What one replica answers to a ``GET`` that all of them get."""

    id: str
    status: int
    body: bytes


class Replica:
    """What runs as a Ray actor, all of whose methods may run at once.

    Args:
        id: The name of the replica.
        setup: The settings of its process.
        locked: Whether the server needs a key, which it checks itself.
    """

    def __init__(self, id: str, setup: WorkerSetup, locked: bool) -> None:
        setup.apply()
        self._id = id
        self._locked = locked
        self._models: Sequence[ServedEngine] = ()
        self._api: Any = None
        self._errors: list[QuantkitError] = []
        self._tell = told_once(self._on_error)

    async def load(self, load: Load) -> ReplicaInfo:
        """Load the models and start their engines.

        Raises:
            QuantkitError: a model can't be loaded, for a reason that a person can act on.
        """
        notes = io.StringIO()
        with contextlib.redirect_stderr(notes):
            try:
                self._models = load()
            except Exception as error:
                failure = plugin_failure(error) or error
                raise (_without_class(failure) if isinstance(failure, QuantkitError) else error) from None
        # whoever reaches this process is the server, which has checked host and key
        self._api = create_app(self._models, keys=["checked"] if self._locked else [],
                               on_error=self._on_error).api
        gc.freeze()  # what is there stays: collections needn't look through it while answers wait
        for model in self._models:
            model.engine.start()
        import ray.util  # here, because whoever imports it first decides where Ray listens

        try:
            chat = self._models[0].loaded.tokenizer.has_chat
        except SourceError:  # there is a template and it can't be used; a request to chat is told why
            chat = False
        return ReplicaInfo(self._id, os.getpid(), ray.util.get_node_ip_address(), chat, notes.getvalue())

    async def check(self) -> None:
        """Returns after a while in which the replica was well.

        Raises:
            RuntimeError: an engine doesn't run any more.
        """
        await asyncio.sleep(CHECK_SECONDS)
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

    async def answer(self, request: ForwardedRequest) -> AsyncIterator[list[Message]]:
        """ASGI messages of the answer, as many at a time as there are. Cancelling it ends the request."""
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
            self._errors.append(_without_class(failure))
        else:
            first = str(error).strip().splitlines()[:1]
            self._errors.append(QuantkitError(
                f"internal error: {': '.join([type(error).__name__, *first])}"))


def _without_class(error: QuantkitError) -> QuantkitError:
    """An error with the same parts, which the server's process can read whatever class this one is of."""
    plain = QuantkitError(error.what, why=error.why, next=error.next)
    plain.exit_code = error.exit_code
    return plain
