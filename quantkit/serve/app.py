"""The application: routes over one engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse

from quantkit import __version__
from quantkit.errors import SourceError
from quantkit.runtime.engine import Engine
from quantkit.runtime.loader import LoadedModel
from quantkit.serve.answers import (
    ChatChunk,
    ChatCompletion,
    HealthResponse,
    ModelList,
    ReadyResponse,
    ServedModel,
    TextChunk,
    TextCompletion,
)
from quantkit.serve.body import BodyRoute
from quantkit.serve.chat import ChatResponse
from quantkit.serve.completions import CompletionResponse
from quantkit.serve.errors import RETRY_AFTER, ApiError, api_error, install
from quantkit.serve.guard import GuardMiddleware
from quantkit.serve.logprobs import TokenTexts
from quantkit.serve.openapi import describe, responses
from quantkit.serve.page import page
from quantkit.serve.reply import GenerationResponse, ServedEngine
from quantkit.serve.schema import ChatRequest, CompletionRequest
from quantkit.serve.sse import ClientDisconnected, EventStream, while_there
from quantkit.serve.threads import BoundedThreads
from quantkit.serve.work import RequestWork

PREPARING = 2
"""Requests whose prompts are made into tokens at once."""
OnError = Callable[[BaseException], None]


class Application:
    """The server as an ASGI application, with what a process needs to end it well.

    Attributes:
        api: its routes.
        guard: what stands before them; call this one.
    """

    def __init__(self, api: FastAPI, guard: GuardMiddleware, engine: Engine) -> None:
        self.api, self.guard, self._engine = api, guard, engine
        self.draining = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI."""
        await self.guard(scope, receive, send)

    async def drain(self, timeout: float | None = None) -> bool:
        """Be not ready from now on, take no new work, and wait until all answers are complete.

        Args:
            timeout: seconds; ``None`` waits for ever.

        Returns:
            Whether they are.
        """
        self.draining = True
        # refusing is instant; the waiting is done here, because an answer is complete only when it was sent
        self._engine.drain(0)
        self.guard.stop_reading()
        try:
            async with asyncio.timeout(timeout):
                await self.guard.idle()
        except TimeoutError:
            return False
        return True


def create_app(engine: Engine, loaded: LoadedModel, *, name: str, loopback: bool = True,
               hosts: Collection[str] = (), key: str | None = None,
               parse_special: bool = False, on_error: OnError | None = None) -> Application:
    """The application over a started engine.

    Args:
        engine: runs the requests; starting and closing it is the caller's.
        loaded: the model it runs.
        name: what requests call it.
        loopback, hosts, key: who may come in; see :class:`quantkit.serve.guard.GuardMiddleware`.
        parse_special: control tokens written out in chat messages become control tokens.
        on_error: told about errors that are nobody's request's fault.
    """
    api = FastAPI(title="quantkit", version=__version__, docs_url=None, redoc_url=None,
                  redirect_slashes=False)
    api.router.route_class = BodyRoute
    install(api)
    loaded.tokenizer.prepare()  # the first request then waits for its own answer only
    model = ServedEngine(engine, loaded, name, TokenTexts(loaded.tokenizer), parse_special)
    guard = GuardMiddleware(api, loopback=loopback, hosts=hosts, key=key, on_error=on_error)
    application = Application(api, guard, engine)
    locked = () if key is None else (401,)
    _add_completions(api, model, locked, on_error)
    _add_models(api, model, locked)
    _add_health(api, application, engine, locked)
    describe(api, model, key=key is not None)
    html, policy = page()

    @api.get("/", include_in_schema=False)
    async def chat_page() -> HTMLResponse:
        return HTMLResponse(html, headers={"Content-Security-Policy": policy, "X-Frame-Options": "DENY"})

    return application


def _add_completions(api: FastAPI, model: ServedEngine, locked: Sequence[int], on_error: OnError
                     | None) -> None:
    threads = BoundedThreads(PREPARING, model.engine.stats()["max_queue"])

    async def respond(request: Request, make: Callable[[], GenerationResponse]) -> Response:
        # templates and tokenizers may take their time with a long text; others' tokens go on meanwhile
        try:
            reply = await while_there(request.receive, threads.run(make))
        except ClientDisconnected:
            return Response(status_code=499)  # nobody reads it
        work = RequestWork(model.engine, reply.jobs)
        if reply.body.stream:
            return EventStream(reply.pieces(work), work.cancel, on_error)
        try:
            return JSONResponse(await while_there(request.receive, reply.whole(work)))
        except ClientDisconnected:
            return Response(status_code=499)
        except Exception as error:
            known = api_error(error)
            if known.status_code == 500 and on_error is not None:
                on_error(error)
            raise known from error
        finally:
            work.cancel()

    may = (404, 413, 503)

    @api.post("/v1/chat/completions", summary="The next turn of a conversation",
              responses=responses(ChatCompletion, *may, *locked, chunk=ChatChunk))
    async def chat(body: ChatRequest, request: Request) -> Response:
        _check(model, body.model)
        return await respond(request, lambda: ChatResponse(model, body))

    @api.post("/v1/completions", summary="The continuation of one or more prompts",
              responses=responses(TextCompletion, *may, *locked, chunk=TextChunk))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        _check(model, body.model)
        return await respond(request, lambda: CompletionResponse(model, body))


def _add_models(api: FastAPI, model: ServedEngine, locked: Sequence[int]) -> None:
    try:
        chat = model.loaded.tokenizer.has_chat
    except SourceError:  # there is a template and it can't be used; a request to chat is told why
        chat = False

    def about() -> dict[str, Any]:
        loaded = model.loaded
        return {"id": model.name, "object": "model", "created": model.created, "owned_by": "quantkit",
                "max_model_len": model.context, "chat": chat, "method": loaded.label,
                "dtype": str(loaded.dtype).removeprefix("torch."), "kv": str(model.engine.cache.spec)}

    @api.get("/v1/models", summary="What is served: one model", responses=responses(ModelList, *locked))
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [about()]}

    @api.get("/v1/models/{name:path}", summary="The same by name",
             responses=responses(ServedModel, 404, *locked))
    async def one(name: str) -> dict[str, Any]:
        _check(model, name)
        return about()


def _add_health(api: FastAPI, application: Application, engine: Engine, locked: Sequence[int]) -> None:
    @api.get("/health", summary="Whether the process lives", responses=responses(HealthResponse))
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @api.get("/ready", summary="Whether it takes requests, and what it is doing",
             responses=responses(ReadyResponse, 503, *locked))
    async def ready() -> dict[str, Any]:
        if application.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", headers=RETRY_AFTER)
        return {"status": "ready", **engine.stats()}


def _check(model: ServedEngine, name: str) -> None:
    if name != model.name:
        raise ApiError(404, f"no model is called {name[:200]!r}; this server has {model.name!r}",
                       param="model", code="model_not_found")
