"""From a body to its answer: prompts are made in threads, the engine works, who leaves is dropped."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from quantkit.runtime.core import EngineClosed, EngineFull
from quantkit.serving.guard import tenant
from quantkit.serving.metrics import Metrics
from quantkit.serving.models import ServedEngine, ServedModels
from quantkit.serving.openai.embeddings import EmbeddingReply
from quantkit.serving.reply import EventStream, Reply, while_there
from quantkit.serving.work import RequestWork, labels

T = TypeVar("T")


class BoundedThreads:
    """Runs functions off the event loop.

    Args:
        running: the largest number of calls that run at once.
        waiting: the largest number of calls that wait for one of them to end.
    """

    def __init__(self, running: int, waiting: int) -> None:
        self._free = asyncio.Semaphore(running)
        self._max_waiting = waiting
        self._waiting = 0

    async def run(self, function: Callable[[], T]) -> T:
        """What ``function`` returns or raises; it sees the caller's context variables. Who is cancelled while
        it waits is dropped; what has begun goes on to its end and counts until then.

        Raises:
            EngineFull: too many wait.
        """
        if self._waiting >= self._max_waiting:
            raise EngineFull(f"{self._waiting} requests wait for a thread", why="those before them take time",
                             next="try again in a moment")
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def tell(result: T | None, error: BaseException | None) -> None:
            self._free.release()
            if done.cancelled():
                return
            if error is None:
                done.set_result(result)  # type: ignore[arg-type]
            else:
                done.set_exception(error)

        def work() -> None:
            result, error = None, None
            try:
                result = function()
            except BaseException as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server is gone
                loop.call_soon_threadsafe(tell, result, error)

        # a thread each rather than a pool, whose threads would keep the process from ending
        try:
            threading.Thread(target=contextvars.copy_context().run, args=[work], name="quantkit-prepare",
                             daemon=True).start()
        except BaseException:  # the system has no thread left: the next request may find one
            self._free.release()
            raise
        return await done


PREPARING = COMPILING = WRITING = 2
"""Requests whose prompts are made into tokens, whose structures are compiled, and whose vectors are written,
at once. Each kind has threads of its own, so that a slow one holds up none of the others."""


class Responder:
    """Answers requests. Where a client leaves, its request ends with ClientDisconnect.

    Args:
        models: The models that are served.
        metrics: These are told how long requests take.
        on_error: This is told about errors of streams that are nobody's request's fault.
    """

    def __init__(self, models: ServedModels, metrics: Metrics,
                 on_error: Callable[[BaseException], None] | None) -> None:
        self.models = models
        self._metrics = metrics
        self._on_error = on_error
        self._max_waiting = max(model.max_queue for model in models)
        self._preparing = BoundedThreads(PREPARING, self._max_waiting)
        self._compiling = BoundedThreads(COMPILING, self._max_waiting)
        self._writing = BoundedThreads(WRITING, self._max_waiting)
        self._embedding = 0
        self._closed = False

    def refuse_more(self) -> None:
        """From now on give the engines no work of new requests. What was begun goes on: a request for many
        vectors still queues the rest of its texts."""
        self._closed = True

    async def generate(self, request: Request, name: str, make: Callable[[ServedEngine], Reply]) -> Response:
        """An answer of the model of that ``name``, whole or streamed, by what ``make`` makes in a thread."""
        model = self.models.find(name)

        async def prepare() -> Reply:
            # templates and tokenizers may take their time with a long text; others' tokens go on meanwhile
            reply = await self._preparing.run(lambda: make(model))
            if reply.structure is not None:
                await self._compiling.run(reply.compile)
            return reply

        reply = await while_there(request.receive, prepare())
        self._check_open()
        work = RequestWork(model.engine, reply.jobs, self._metrics.of(model.name),
                           labels(reply.id, len(reply.jobs), tenant(request)))
        if reply.stream:
            return EventStream(reply, work, self._on_error)
        try:
            return JSONResponse(await while_there(request.receive, reply.body(work)))
        finally:
            work.cancel()

    async def embed(self, request: Request, name: str,
                    make: Callable[[ServedEngine], EmbeddingReply]) -> Response:
        model = self.models.find(name)

        async def answer() -> bytes:
            reply = await self._preparing.run(lambda: make(model))
            self._check_open()
            if self._embedding >= self._max_waiting:
                raise EngineFull(f"{self._embedding} requests for vectors are under way already",
                                 why="texts of each may have to wait", next="try again in a moment")
            self._embedding += 1
            try:
                vectors, cached = await reply.collect(self._metrics.of(model.name), tenant(request))
                return await self._writing.run(lambda: reply.body(vectors, cached))
            finally:
                self._embedding -= 1

        return Response(await while_there(request.receive, answer()), media_type="application/json")

    async def compute(self, request: Request, name: str | None,
                      make: Callable[[ServedEngine], Any]) -> Response:
        """What a thread makes of a request without the engine."""
        model = self.models.find(name)
        return JSONResponse(await while_there(request.receive, self._preparing.run(lambda: make(model))))

    def _check_open(self) -> None:
        """Raises EngineClosed: the server takes no more work."""
        if self._closed:
            raise EngineClosed("the server is shutting down")
