"""From a body to its answer: prompts are made in threads, the engine works, and the answer goes out whole or
as server-sent events. A client that leaves ends its request."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from quantkit.runtime.core import EngineClosed, EngineFull
from quantkit.serving.errors import ApiError, api_error
from quantkit.serving.guard import tenant
from quantkit.serving.ignored import IGNORED
from quantkit.serving.metrics import Metrics
from quantkit.serving.models import ServedEngine, ServedModels
from quantkit.serving.openai.embeddings import EmbeddingReply
from quantkit.serving.work import ChoiceJob, RequestWork, labels
from quantkit.structure.grammar import Structure

T = TypeVar("T")
FINISH = {"stop": "stop", "stop_string": "stop", "length": "length", "tool_calls": "tool_calls"}
"""Why a sequence ended, in OpenAI's words: whether by the model or by a stop text is one thing there."""
DONE, COMMENT = b"data: [DONE]\n\n", b": keep-alive\n\n"
QUIET_SECONDS = 15.0
"""Time without an event after which clients are told that the answer is under way. Many give up after 300
seconds."""


class Reply(ABC):
    """One request's answer: jobs for the engine, and a body or events made of what comes of them.

    Attributes:
        model: The model that answers.
        id: The id of the answer.
        jobs: A job for each choice, in the order of their indices; they have a constraint once
            :meth:`compile` was called.
        structure: The structure that each choice must have.
        stream: Whether the answer is sent as it comes.
        event_names: Whether each event of a stream has its ``type`` as name.
        ends_with_done: Whether ``[DONE]`` ends a stream.
    """

    model: ServedEngine
    id: str
    jobs: Sequence[ChoiceJob]
    structure: Structure | None
    stream: bool
    event_names = False
    ends_with_done = True

    def compile(self) -> None:
        """Give the jobs their constraints. It may take seconds. Parts of schemas that are left out count as
        ignored.

        Raises:
            ApiError: the structure can't be compiled.
        """
        if self.structure is not None:
            compiled = self.model.compile(self.structure)
            for part in compiled.widened:
                IGNORED.get().other(part)
            self.jobs = [replace(job, constraint=compiled()) for job in self.jobs]

    @abstractmethod
    async def body(self, work: RequestWork) -> dict[str, Any]:
        """The answer as one object, when everything is there."""

    @abstractmethod
    def events(self, work: RequestWork) -> AsyncIterator[dict[str, Any]]:
        """The answer as it comes: events."""

    def keep_alive(self) -> dict[str, Any] | None:
        """An event without content, for clients that wait for events; ``None``: a comment is enough."""
        return None

    def error(self, error: ApiError) -> dict[str, Any]:
        """The event that tells of an error in a stream."""
        return error.body()


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

        def end(report: Callable[[], None]) -> None:
            self._free.release()
            if not done.cancelled():
                report()

        def work() -> None:
            try:
                report = partial(done.set_result, function())
            except BaseException as error:
                report = partial(done.set_exception, error)
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server is gone
                loop.call_soon_threadsafe(end, report)

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


async def while_there(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``, but give it up as soon as the client leaves. Raises ClientDisconnect in that case.

    Args:
        receive: The function of ASGI, of a request whose body was read.
        work: The coroutine, which is cancelled when nobody waits for it.
    """
    running, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({running, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        raise ClientDisconnect
    finally:
        for task in (running, leaving):
            task.cancel()
        await asyncio.gather(running, leaving, return_exceptions=True)


class EventStream(Response):
    """Server-sent events; https://html.spec.whatwg.org/multipage/server-sent-events.html.

    An error after the first byte can't have a status of its own: it is sent as an event. While nothing comes,
    as when a long prompt is read or a call is written that is held back, clients are kept from giving up
    (:meth:`Reply.keep_alive`).

    Args:
        reply: The answer that is sent.
        work: The engine's work for it, which is cancelled when the stream is over, however it ended.
        on_error: This is told about an exception that isn't the client's doing.
    """

    media_type = "text/event-stream"

    def __init__(self, reply: Reply, work: RequestWork,
                 on_error: Callable[[BaseException], None] | None = None) -> None:
        self.status_code, self.background = 200, None
        self._reply = reply
        self._work = work
        self._on_error = on_error
        self._quiet = True
        self.init_headers({"x-accel-buffering": "no"})  # a proxy that collects events defeats their purpose

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = self._reply

        async def write() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            waiting = asyncio.ensure_future(self._keep_alive(send))
            try:
                async for event in reply.events(self._work):
                    self._quiet = False
                    await _chunk(send, event_bytes(event, reply.event_names))
            except Exception as error:
                known = api_error(error)
                if known.status_code == 500 and self._on_error is not None:
                    self._on_error(error)
                await _chunk(send, event_bytes(reply.error(known), reply.event_names))
            finally:
                waiting.cancel()
            if reply.ends_with_done:
                await _chunk(send, DONE)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await while_there(receive, write())
        except ClientDisconnect:
            pass
        finally:
            self._work.cancel()

    async def _keep_alive(self, send: Send) -> None:
        while True:
            self._quiet = True
            await asyncio.sleep(QUIET_SECONDS)
            if self._quiet:
                event = self._reply.keep_alive()
                await _chunk(send, COMMENT if event is None else event_bytes(event, self._reply.event_names))


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _chunk(send: Send, body: bytes) -> Awaitable[None]:
    return send({"type": "http.response.body", "body": body, "more_body": True})


def event_bytes(event: dict[str, Any], named: bool) -> bytes:
    """An event as it is sent. ``named``: whether its type is its name."""
    name = f"event: {event['type']}\n" if named else ""
    text = json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"{name}data: {text}\n\n".encode()
