"""What all answers of a model are to the server: jobs for the engine, and a body or server-sent events made
of them, which stop when the client disconnects."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from quantkit.serving.errors import ApiError, api_error
from quantkit.serving.ignored import IGNORED
from quantkit.serving.models import ServedEngine
from quantkit.serving.work import ChoiceJob, RequestWork
from quantkit.structure.grammar import Structure

FINISH = {"stop": "stop", "stop_string": "stop", "length": "length", "tool_calls": "tool_calls"}
"""Why a sequence ended, in OpenAI's words: whether by the model or by a stop text is one thing there."""


class Reply(ABC):
    """One request's answer.

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


T = TypeVar("T")
DONE, COMMENT = b"data: [DONE]\n\n", b": keep-alive\n\n"
QUIET_SECONDS = 15.0
"""Time without an event after which clients are told that the answer is under way. Many give up after 300
seconds."""


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
