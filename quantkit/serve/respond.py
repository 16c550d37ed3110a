"""From a body to its answer: prompts are made in threads, the engine works, who leaves is dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from quantkit.serve.errors import api_error
from quantkit.serve.metrics import Metrics
from quantkit.serve.models import ServedEngine, ServedModels
from quantkit.serve.openai.embeddings import EmbeddingReply
from quantkit.serve.reply import Reply
from quantkit.serve.sse import ClientDisconnected, EventStream, while_there
from quantkit.serve.threads import BoundedThreads
from quantkit.serve.work import RequestWork

PREPARING = 2
"""Requests whose prompts are made into tokens at once."""


class Responder:
    """Answers requests.

    Args:
        models: what is served.
        metrics: what is told how long requests take.
        on_error: told about errors that are nobody's request's fault.
    """

    def __init__(self, models: ServedModels, metrics: Metrics,
                 on_error: Callable[[BaseException], None] | None) -> None:
        self.models, self._metrics, self._on_error = models, metrics, on_error
        self._threads = BoundedThreads(PREPARING, max(model.max_queue for model in models))

    async def generate(self, request: Request, name: str, make: Callable[[ServedEngine], Reply]) -> Response:
        """An answer of the model of that ``name``, whole or streamed, by what ``make`` makes in a thread."""
        model = self.models.find(name)
        # templates and tokenizers may take their time with a long text; others' tokens go on meanwhile
        try:
            reply = await while_there(request.receive, self._threads.run(lambda: make(model)))
        except ClientDisconnected:
            return Response(status_code=499)  # nobody reads it
        work = RequestWork(model.engine, reply.jobs, self._metrics.of(model.name))
        if reply.stream:
            return EventStream(reply, work, self._on_error)
        try:
            return JSONResponse(await while_there(request.receive, reply.whole(work)))
        except ClientDisconnected:
            return Response(status_code=499)
        except Exception as error:
            raise self._told(error) from error
        finally:
            work.cancel()

    async def embed(self, request: Request, name: str,
                    make: Callable[[ServedEngine], EmbeddingReply]) -> Response:
        """Vectors."""
        model = self.models.find(name)

        async def answer() -> bytes:
            reply = await self._threads.run(lambda: make(model))
            vectors, cached = await reply.collect(self._metrics.of(model.name))
            return await self._threads.run(lambda: reply.body(vectors, cached))

        try:
            return Response(await while_there(request.receive, answer()), media_type="application/json")
        except ClientDisconnected:
            return Response(status_code=499)
        except Exception as error:
            raise self._told(error) from error

    async def compute(self, request: Request, name: str | None,
                      make: Callable[[ServedEngine], Any]) -> Response:
        """What a thread makes of a request without the engine."""
        model = self.models.find(name)
        try:
            return JSONResponse(await while_there(request.receive, self._threads.run(lambda: make(model))))
        except ClientDisconnected:
            return Response(status_code=499)

    def _told(self, error: Exception) -> Exception:
        known = api_error(error)
        if known.status_code == 500 and self._on_error is not None:
            self._on_error(error)
        return known
