"""The server's side of replicas: every request goes to one of them, and its answer comes back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from quantkit.runtime.core import EngineClosed
from quantkit.serving.answers import ModelState
from quantkit.serving.app import Application, OnError
from quantkit.serving.body import check_structure
from quantkit.serving.errors import ANTHROPIC, RETRY_AFTER, ApiError, api_error
from quantkit.serving.guard import TENANT, GuardMiddleware
from quantkit.serving.ignored import HEADER, IgnoredLog
from quantkit.serving.metrics import CONTENT_TYPE
from quantkit.serving.replicas.balance import WRITING, PrefixBalancer, prefix_blocks
from quantkit.serving.replicas.replica import REPORT, ForwardedRequest
from quantkit.serving.replicas.replica_set import ReplicaLostError, ReplicaSet
from quantkit.serving.reply import DONE, event_bytes, while_there

ATTEMPTS = 2
"""Replicas that a request is given to: one that ends its replica's process must not end all of them."""
ENGINE_PATHS = WRITING | {"/v1/embeddings"}
"""Paths of requests that are work for an engine."""
SCOPE_KEYS = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string",
              "root_path", "headers", "client", "server", TENANT)
SECRET_HEADERS = {b"authorization", b"cookie", b"proxy-authorization", b"x-api-key"}
"""Headers for the server alone, which has checked them."""
REPLICA_SECONDS, POLL_SECONDS = 60.0, 0.02
"""The time that a request waits for a replica while none runs, and between two looks."""
STATE_SECONDS = 10.0
"""The time that a replica has to say how it is."""
PREAMBLE = frozenset(f"event: {name}".encode()
                     for name in ("message_start", "response.created", "response.in_progress"))
"""First lines of the events that a stream has before its first token, each of them once."""


def create_replicated_app(replicas: ReplicaSet, *, slack: int = 8, loopback: bool = True,
                          hosts: Collection[str] = (), keys: Collection[str] = (),
                          on_error: OnError | None = None,
                          on_ignored: Callable[[str], None] | None = None) -> Application:
    """The application over started replicas.

    Args:
        replicas: The started replicas.
        slack: The requests that a replica may have more than the least busy one and still get another.
        loopback, hosts, keys: who may come in; see :class:`quantkit.serving.guard.GuardMiddleware`.
        on_error: told about errors that are nobody's request's fault.
        on_ignored: told what is ignored in requests: a line for each kind of it and each client.
    """
    forwarder = Forwarder(replicas, slack, on_error, None if on_ignored is None else IgnoredLog(on_ignored))
    guard = GuardMiddleware(forwarder, loopback=loopback, hosts=hosts, keys=keys, on_error=on_error)
    return Application(forwarder, guard, refuse_more=forwarder.close, close=replicas.close)


class Forwarder:
    """An ASGI application whose answers are those of replicas.

    A request whose replica ends before a token of the answer was sent is given to another one. After that a
    stream ends with an error event. So it does after the first sign that a long prompt is still being read
    (:data:`~quantkit.serving.reply.QUIET_SECONDS`): clients that heard nothing would give up, and what one of
    them got can't be taken back.

    Args:
        replicas: The started replicas.
        slack: The requests that a replica may have more than the least busy one and still get another.
        on_error: told about errors of replicas that are nobody's request's fault.
        ignored_log: notes what replicas ignored in requests.

    Attributes:
        closed: whether requests for an engine are refused, because the server is ending.
    """

    def __init__(self, replicas: ReplicaSet, slack: int, on_error: OnError | None = None,
                 ignored_log: IgnoredLog | None = None) -> None:
        self._replicas = replicas
        self._balancer = PrefixBalancer(slack)
        self._on_error = on_error
        self._ignored_log = ignored_log
        self.closed = False

    def close(self) -> None:
        """Refuse new work from now on."""
        self.closed = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        state = {"/health": self._health, "/ready": self._ready, "/metrics": self._metrics}.get(path)
        if state is not None and scope["method"] == "GET":
            response = await state()
            return await response(scope, receive, send)
        if path == "/trace":
            raise ApiError(404, "a server of several replicas has no trace: each has a clock of its own",
                           code="not_found")
        with contextlib.suppress(ClientDisconnect):  # nobody reads the answer
            body = await Request(scope, receive).body()
            if self.closed and scope["method"] == "POST" and path in ENGINE_PATHS:
                raise _shutting_down()
            check_structure(body)
            blocks = prefix_blocks(path, body, scope.get(TENANT, b""))
            request = ForwardedRequest(_forwarded_scope(scope), body)
            await while_there(receive, self._answer(request, blocks, send))

    async def _answer(self, request: ForwardedRequest, blocks: Sequence[int], send: Send) -> None:
        for _ in range(ATTEMPTS):
            answer = _AnswerStream(request.scope["path"], send)
            replica = self._balancer.choose(blocks, await self._running())
            try:
                await self._forward(replica, request, answer)
                return
            except ReplicaLostError:
                if answer.begun:
                    await answer.fail(self._lost())
                    return
            finally:
                self._balancer.ended(replica)
        raise self._lost()

    async def _running(self) -> list[str]:
        """The replicas that run, once there is one."""
        deadline = time.monotonic() + REPLICA_SECONDS
        while not (running := self._replicas.running):
            if time.monotonic() > deadline:
                raise ApiError(503, "no replica runs; send the request again later", code="replica_lost",
                               headers=RETRY_AFTER)
            await asyncio.sleep(POLL_SECONDS)
        return running

    def _lost(self) -> ApiError:
        """What a client is told whose replica ended."""
        if self.closed:  # replicas end with the server
            return _shutting_down()
        return ApiError(503, "the replica that was answering has ended; send the request again",
                        code="replica_lost", headers=RETRY_AFTER)

    async def _forward(self, replica: str, request: ForwardedRequest, answer: _AnswerStream) -> None:
        # a client that has all of its answer leaves, which must not cancel what the replica has yet to say
        last: Message | None = None
        try:
            async with contextlib.aclosing(self._replicas.answer(replica, request)) as batches:
                async for batch in batches:
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

    def _log_ignored(self, request: ForwardedRequest, message: Message) -> None:
        if self._ignored_log is None or message["type"] != "http.response.start":
            return
        answered = {name.lower(): value for name, value in message["headers"]}
        if names := answered.get(HEADER.encode(), b"").decode():
            client = dict(request.scope["headers"]).get(b"user-agent", b"").decode("latin-1")
            self._ignored_log.add(client, names.split(", "))

    def _report(self, message: Message) -> None:
        if self._on_error is not None:
            for error in message["errors"]:
                self._on_error(error)

    async def _health(self) -> Response:
        return JSONResponse({"status": "ok"})

    async def _ready(self) -> Response:
        if self.closed:
            raise _shutting_down()
        return JSONResponse(combined_state(await self._state("/ready")))

    async def _metrics(self) -> Response:
        text = combined_metrics(await self._state("/metrics"))
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def _state(self, path: str) -> dict[str, bytes]:
        """What each replica answers to ``GET path``; those that don't in time, or refuse, are left out."""
        names = sorted(self._replicas.running)
        bodies = await asyncio.gather(*(self._get(name, path) for name in names), return_exceptions=True)
        answers = {name: body for name, body in zip(names, bodies, strict=True) if isinstance(body, bytes)}
        if not answers:
            raise ApiError(503, "no replica runs", code="overloaded", headers=RETRY_AFTER)
        return answers

    async def _get(self, replica: str, path: str) -> bytes | None:
        scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": []}
        body = b""
        async with asyncio.timeout(STATE_SECONDS), contextlib.aclosing(
                self._replicas.answer(replica, ForwardedRequest(scope, b""))) as batches:
            async for batch in batches:
                for message in batch:
                    if message["type"] == REPORT:
                        self._report(message)
                    elif message.get("status", 200) != 200:
                        return None
                    body += message.get("body", b"")
        return body


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
            event = event_bytes(error.anthropic_body(), named=True)
        elif self._path == "/v1/responses":
            event = event_bytes({"type": "error", "sequence_number": self._events, "code": error.code,
                                 "message": error.detail, "param": error.param}, named=True)
        else:
            event = event_bytes(error.body(), named=False) + DONE
        await self._send({"type": "http.response.body", "body": event, "more_body": False})


def _forwarded_scope(scope: Scope) -> dict[str, Any]:
    """What replicas get of a request's scope."""
    headers = [(name, value) for name, value in scope["headers"] if name.lower() not in SECRET_HEADERS]
    return {key: scope[key] for key in SCOPE_KEYS if key in scope} | {"headers": headers}


def _shutting_down() -> ApiError:
    return api_error(EngineClosed("the server is shutting down"))


def combined_state(answers: Mapping[str, bytes]) -> dict[str, Any]:
    """``/ready`` of the server: sums over the replicas, of all models and of each."""
    states = [json.loads(body) for body in answers.values()]
    names = list(dict.fromkeys(name for state in states for name in state["models"]))
    return {"status": "ready", **_sum(states),
            "models": {name: _sum([state["models"][name] for state in states]) for name in names}}


def combined_metrics(answers: Mapping[str, bytes]) -> bytes:
    """``/metrics`` of the server: those of every replica, with its name as the label ``replica``."""
    registry = CollectorRegistry()
    registry.register(_Collected(answers))
    return generate_latest(registry)


class _Collected(Collector):
    def __init__(self, answers: Mapping[str, bytes]) -> None:
        self._answers = answers

    def collect(self) -> Iterable[Metric]:
        """Each family once, with the samples of all replicas."""
        families: dict[str, Metric] = {}
        for name, body in self._answers.items():
            for family in text_string_to_metric_families(body.decode()):
                merged = families.setdefault(family.name, Metric(family.name, family.documentation,
                                                                 family.type, family.unit))
                for sample in family.samples:
                    merged.add_sample(sample.name, {**sample.labels, "replica": name}, sample.value)
        return families.values()


def _sum(states: Sequence[dict[str, Any]]) -> dict[str, int]:
    return {key: sum(state[key] for state in states) for key in ModelState.model_fields}
