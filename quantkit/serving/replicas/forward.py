"""The server's side of replicas: every request goes to one of them, and its answer comes back."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from quantkit.runtime.core import EngineClosed
from quantkit.serving.body import check_structure
from quantkit.serving.errors import ANTHROPIC, RETRY_AFTER, ApiError, api_error
from quantkit.serving.guard import TENANT
from quantkit.serving.ignored import HEADER, IgnoredLog
from quantkit.serving.metrics import CONTENT_TYPE
from quantkit.serving.replicas.base import (
    REPORT,
    ForwardedRequest,
    ReplicaAnswer,
    ReplicaLostError,
    Replicas,
)
from quantkit.serving.replicas.combine import combined_metrics, combined_state
from quantkit.serving.replicas.prefix import WRITING, prefix_blocks
from quantkit.serving.sse import DONE, ClientDisconnected, while_there
from quantkit.support.errors import QuantkitError

ATTEMPTS = 2
"""Replicas that a request is given to: one that ends its replica's process must not end all of them."""
ENGINE_PATHS = WRITING | {"/v1/embeddings"}
"""Paths of requests that are work for an engine."""
SCOPE_KEYS = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string",
              "root_path", "headers", "client", "server", TENANT)
SECRET_HEADERS = {b"authorization", b"cookie", b"proxy-authorization", b"x-api-key"}
"""Headers for the server alone, which has checked them."""
PATIENCE = 60.0
"""Seconds that a request waits for a replica while none runs."""
PREAMBLE = frozenset(f"event: {name}".encode()
                     for name in ("message_start", "response.created", "response.in_progress"))
"""First lines of the events that a stream has before its first token, each of them once."""


class Forwarder:
    """An ASGI application whose answers are those of replicas.

    A request whose replica ends before a token of the answer was sent is given to another one. After that a
    stream ends with an error event. So it does after the first sign that a long prompt is still being read
    (:data:`~quantkit.serving.sse.QUIET_SECONDS`): clients that heard nothing would give up, and what one of
    them got can't be taken back.

    Args:
        replicas: answer.
        on_error: told about errors of replicas that are nobody's request's fault.
        ignored_log: notes what replicas ignored in requests.

    Attributes:
        closed: whether requests for an engine are refused, because the server is ending.
    """

    def __init__(self, replicas: Replicas, on_error: Callable[[BaseException], None] | None = None,
                 ignored_log: IgnoredLog | None = None) -> None:
        self._replicas, self._on_error, self._ignored_log = replicas, on_error, ignored_log
        self.closed = False

    def close(self) -> None:
        """Refuse new work from now on."""
        self.closed = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        path = scope["path"]
        state = {"/health": self._health, "/ready": self._ready, "/metrics": self._metrics}.get(path)
        if state is not None and scope["method"] == "GET":
            response = await state()
            return await response(scope, receive, send)
        if path == "/trace":
            raise ApiError(404, "a server of several replicas has no trace: each has a clock of its own",
                           code="not_found")
        body = await _body(receive)
        if body is None:
            return  # the client has left
        if self.closed and scope["method"] == "POST" and path in ENGINE_PATHS:
            raise _shutting_down()
        check_structure(body)
        blocks = prefix_blocks(path, body, scope.get(TENANT, b""))
        request = ForwardedRequest(_forwarded_scope(scope), body, blocks)
        with contextlib.suppress(ClientDisconnected):
            await while_there(receive, self._answer(request, send))

    async def _answer(self, request: ForwardedRequest, send: Send) -> None:
        for _ in range(ATTEMPTS):
            answer = _AnswerStream(request.scope["path"], send)
            try:
                await self._forward(request, answer)
                return
            except ReplicaLostError:
                if answer.begun:
                    await answer.fail(self._lost())
                    return
        raise self._lost()

    def _lost(self) -> ApiError:
        """What a client is told whose replica ended."""
        if self.closed:  # replicas end with the server
            return _shutting_down()
        return ApiError(503, "the replica that was answering has ended; send the request again",
                        code="replica_lost", headers=RETRY_AFTER)

    async def _forward(self, request: ForwardedRequest, answer: _AnswerStream) -> None:
        # a client that has all of its answer leaves, which must not cancel what the replica has yet to say
        last: Message | None = None
        try:
            async with contextlib.aclosing(self._replicas.answer(request)) as batches:
                async for batch in self._started(batches):
                    for message in batch:
                        if message["type"] == REPORT:
                            self._report(message)
                        elif message["type"] == "http.response.body" and not message.get("more_body", False):
                            last = message
                        else:
                            self._log_ignored(request, message)
                            await answer.send(message)
        except ReplicaLostError:
            if last is None:
                raise  # otherwise the answer was complete
        if last is not None:
            await answer.send(last)

    async def _started(self, batches: AsyncGenerator[list[Any], None]) -> AsyncIterator[list[Any]]:
        """All batches. The first isn't waited for while no replica runs."""
        first = asyncio.ensure_future(anext(batches, []))
        try:
            while not (await asyncio.wait({first}, timeout=PATIENCE))[0]:
                if not await self._replicas.any_runs():
                    raise ApiError(503, "no replica runs; send the request again later", code="replica_lost",
                                   headers=RETRY_AFTER)
        finally:
            first.cancel()
            await asyncio.wait({first})
        yield first.result()
        async for batch in batches:
            yield batch

    def _log_ignored(self, request: ForwardedRequest, message: Message) -> None:
        if self._ignored_log is None or message["type"] != "http.response.start":
            return
        answered = {name.lower(): value for name, value in message["headers"]}
        if names := answered.get(HEADER.encode(), b"").decode():
            client = dict(request.scope["headers"]).get(b"user-agent", b"").decode("latin-1")
            self._ignored_log.add(client, names.split(", "))

    def _report(self, message: Message) -> None:
        if self._on_error is not None:
            for what, why, next in message["errors"]:
                self._on_error(QuantkitError(what, why=why, next=next))

    async def _health(self) -> Response:
        return JSONResponse({"status": "ok"})

    async def _ready(self) -> Response:
        if self.closed:
            raise _shutting_down()
        return JSONResponse(combined_state(await self._state("/ready")))

    async def _metrics(self) -> Response:
        text = combined_metrics(await self._state("/metrics"))
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def _state(self, path: str) -> list[ReplicaAnswer]:
        answers = [answer for answer in await self._replicas.get(path) if answer.status == 200]
        if not answers:
            raise ApiError(503, "no replica runs", code="overloaded", headers=RETRY_AFTER)
        return answers


class _AnswerStream:
    """One attempt to answer: holds back what comes before the first token or the first keep-alive.

    Attributes:
        begun: whether the client got a part of the answer.
    """

    def __init__(self, path: str, send: Send) -> None:
        self._path, self._send = path, send
        self._waiting: list[Message] = []
        self._preamble = set(PREAMBLE)  # that didn't come yet
        self._events = 0
        self.begun = False

    async def send(self, message: Message) -> None:
        body = message.get("body", b"")
        self._events += bool(body)  # a message of a stream is an event
        first_line = body.partition(b"\n")[0]
        if not self.begun and (message["type"] == "http.response.start" or first_line in self._preamble):
            self._waiting.append(message)
            self._preamble.discard(first_line)
            return
        self.begun = True
        for earlier in self._waiting:
            await self._send(earlier)
        self._waiting.clear()
        await self._send(message)

    async def fail(self, error: ApiError) -> None:
        """End the stream with an error, as the API of its path has it."""
        if self._path == ANTHROPIC:
            event = _named("error", error.anthropic_body())
        elif self._path == "/v1/responses":
            event = _named("error", {"type": "error", "sequence_number": self._events, "code": error.code,
                                     "message": error.detail, "param": error.param})
        else:
            event = _data(error.body()) + DONE
        await self._send({"type": "http.response.body", "body": event, "more_body": False})


def _forwarded_scope(scope: Scope) -> dict[str, Any]:
    """What replicas get of a request's scope."""
    headers = [(name, value) for name, value in scope["headers"] if name.lower() not in SECRET_HEADERS]
    return {key: scope[key] for key in SCOPE_KEYS if key in scope} | {"headers": headers}


def _named(name: str, body: dict[str, Any]) -> bytes:
    return f"event: {name}\n".encode() + _data(body)


def _data(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def _shutting_down() -> ApiError:
    return api_error(EngineClosed("the server is shutting down"))


async def _body(receive: Receive) -> bytes | None:
    """All of a request's body; ``None`` if its client left before it came."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)
