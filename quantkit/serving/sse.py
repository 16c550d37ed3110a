"""Server-sent events that stop when the client disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

from quantkit.serving.errors import api_error
from quantkit.serving.reply import Reply
from quantkit.serving.work import RequestWork

T = TypeVar("T")
DONE, COMMENT = b"data: [DONE]\n\n", b": keep-alive\n\n"
QUIET_SECONDS = 15.0
"""Time without an event after which clients are told that the answer is under way. Many give up after 300
seconds."""


class ClientDisconnected(Exception):
    """The client closed its connection."""


async def while_there(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``, but give it up as soon as the client leaves. Raises ClientDisconnected in that case.

    Args:
        receive: of a request whose body was read.
        work: cancelled when nobody waits for it.
    """
    running, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({running, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        raise ClientDisconnected
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
        reply: what is sent.
        work: where it comes from; cancelled when it is over, however it ended.
        on_error: told about an exception that isn't the client's doing.
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
        """Send it all."""
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
        except ClientDisconnected:
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
