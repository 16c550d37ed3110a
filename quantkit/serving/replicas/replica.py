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

from starlette.types import Message

from quantkit.executor.cluster import WorkerSetup
from quantkit.plugins.blame import plugin_failure
from quantkit.serving.app import create_app, told_once
from quantkit.serving.errors import api_error, reported
from quantkit.serving.models import ServedEngine
from quantkit.support.errors import QuantkitError

Load = Callable[[], Sequence[ServedEngine]]
HEADER = b"x-quantkit-replica"
"""Header of an answer that names the replica that gave it."""
REPORT = "quantkit.report"
"""Type of a message among ASGI's, with errors that the server's terminal is told of."""
MAX_MESSAGES = 256
"""Messages of an answer that wait to be sent; the application waits while there are more."""
CHECK_SECONDS = 2.0
"""The time that a replica takes to say that it is well."""


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
        self._on_error = told_once(lambda error: self._errors.append(reported(error)))

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
                known = isinstance(plugin_failure(error) or error, QuantkitError)
                raise (reported(error) if known else error) from None
        # whoever reaches this process is the server, which has checked host and key
        self._api = create_app(self._models, keys=["checked"] if self._locked else [],
                               on_error=self._on_error).api
        gc.freeze()  # what is there stays: collections needn't look through it while answers wait
        for model in self._models:
            model.engine.start(self._on_error)
        import ray.util  # here, because whoever imports it first decides where Ray listens

        return ReplicaInfo(self._id, os.getpid(), ray.util.get_node_ip_address(), self._models[0].can_chat,
                           notes.getvalue())

    async def check(self) -> None:
        """Returns after a while in which the replica was well.

        Raises:
            QuantkitError: an error has ended an engine's thread.
        """
        await asyncio.sleep(CHECK_SECONDS)
        self._check_engines()

    def _check_engines(self) -> None:
        for model in self._models:
            try:
                model.engine.check_alive()
            except QuantkitError as error:
                raise reported(error) from None

    async def answer(self, request: ForwardedRequest) -> AsyncIterator[list[Message]]:
        """ASGI messages of the answer, as many at a time as there are. Cancelling it ends the request.

        Raises:
            QuantkitError: an error has ended an engine's thread, so that another replica must answer.
        """
        self._check_engines()
        messages: asyncio.Queue[Message | None] = asyncio.Queue(MAX_MESSAGES)
        bodies = [{"type": "http.request", "body": request.body, "more_body": False}]
        scope = dict(request.scope)
        started = False

        async def receive() -> Message:
            if bodies:
                return bodies.pop()
            await asyncio.Event().wait()  # a client that leaves cancels this
            raise AssertionError

        async def send(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], (HEADER, self._id.encode())]
            await messages.put(message)

        async def run() -> None:
            try:
                await self._api(scope, receive, send)
            except Exception as error:
                self._on_error(error)
                if not started:
                    await api_error(error).response(scope["path"])(scope, receive, send)
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
        finally:
            running.cancel()
