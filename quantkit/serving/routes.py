"""The routes, but for the page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response

from quantkit.serving import answers
from quantkit.serving.anthropic.messages import MessagesReply, count_tokens
from quantkit.serving.anthropic.request import CountRequest, MessagesRequest
from quantkit.serving.errors import RETRY_AFTER, ApiError
from quantkit.serving.guard import tenant
from quantkit.serving.metrics import CONTENT_TYPE, Metrics
from quantkit.serving.openai.chat import ChatReply
from quantkit.serving.openai.chat_request import ChatRequest
from quantkit.serving.openai.completions import CompletionReply, CompletionRequest
from quantkit.serving.openai.embeddings import EmbeddingReply, EmbeddingRequest
from quantkit.serving.openai.responses import ResponsesReply
from quantkit.serving.openai.responses_request import ResponsesRequest
from quantkit.serving.openai.tokens import DetokenizeRequest, TokenizeRequest, detokenize, tokenize
from quantkit.serving.openapi import anthropic_responses, responses, text_responses
from quantkit.serving.reply import Responder
from quantkit.serving.timeline import Timeline, TraceResponse


def add_routes(api: FastAPI, responder: Responder, metrics: Metrics, draining: Callable[[], bool],
               locked: Sequence[int]) -> None:
    """Add all routes.

    Args:
        api: The application that gets them.
        responder: This answers with what the models make of a request.
        metrics: The metrics of the server.
        draining: This says whether the server is ending.
        locked: The statuses that are answered without the key, if there is one.
    """
    models, timeline = responder.models, Timeline(responder.models)
    errors = (404, 413, 503, *locked)  # that whatever a model answers may have

    @api.post("/v1/chat/completions", summary="The next turn of a conversation",
              responses=responses(answers.ChatCompletion, *errors, chunk=answers.ChatChunk))
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await responder.generate(request, body.model, lambda model: ChatReply(model, body))

    @api.post("/v1/completions", summary="The continuation of one or more prompts",
              responses=responses(answers.TextCompletion, *errors, chunk=answers.TextChunk))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await responder.generate(request, body.model, lambda model: CompletionReply(model, body))

    @api.post("/v1/responses", summary="The next turn of a conversation, in items",
              responses=responses(answers.ResponseAnswer, *errors, chunk=answers.ResponseEvent, done=False))
    async def response(body: ResponsesRequest, request: Request) -> Response:
        return await responder.generate(request, body.model, lambda model: ResponsesReply(model, body))

    @api.post("/v1/messages", summary="The next turn of a conversation, as Anthropic's API has it",
              responses=anthropic_responses(answers.MessageAnswer, *errors, chunk=answers.AnthropicEvent))
    async def messages(body: MessagesRequest, request: Request) -> Response:
        return await responder.generate(request, body.model, lambda model: MessagesReply(model, body))

    @api.post("/v1/messages/count_tokens", summary="How many tokens a conversation has",
              responses=anthropic_responses(answers.MessageTokenCount, *errors))
    async def count(body: CountRequest, request: Request) -> Response:
        return await responder.compute(request, body.model, lambda model: count_tokens(model, body))

    @api.post("/v1/embeddings", summary="Vectors of texts",
              responses=responses(answers.EmbeddingList, *errors))
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        return await responder.embed(request, body.model, lambda model: EmbeddingReply(model, body))

    @api.post("/tokenize", summary="Tokens of a text or a conversation",
              responses=responses(answers.Tokenized, *errors))
    async def tokens(body: TokenizeRequest, request: Request) -> Response:
        return await responder.compute(request, body.model, lambda model: tokenize(model, body))

    @api.post("/detokenize", summary="The text of tokens", responses=responses(answers.Detokenized, *errors))
    async def text(body: DetokenizeRequest, request: Request) -> Response:
        return await responder.compute(request, body.model, lambda model: detokenize(model, body))

    @api.get("/v1/models", summary="What is served", responses=responses(answers.ModelList, *locked))
    async def listed() -> dict[str, Any]:
        return {"object": "list", "data": [model.about() for model in models]}

    @api.get("/v1/models/{name:path}", summary="One model by its name",
             responses=responses(answers.ServedModel, 404, *locked))
    async def model_info(name: str) -> dict[str, Any]:
        return models.named(name).about()

    @api.get("/health", summary="Whether the process and its engines live",
             responses=responses(answers.HealthResponse, 503))
    async def health() -> dict[str, str]:
        models.check_alive()
        return {"status": "ok"}

    @api.get("/ready", summary="Whether it takes requests, and what it is doing",
             responses=responses(answers.ReadyResponse, 503, *locked))
    async def ready() -> dict[str, Any]:
        if draining():
            raise ApiError(503, "the server is shutting down", code="shutting_down", headers=RETRY_AFTER)
        models.check_alive()
        states = {model.name: {key: value for key, value in model.engine.stats().items()
                               if key in answers.ModelState.model_fields} for model in models}
        total = {key: sum(state[key] for state in states.values()) for key in answers.ModelState.model_fields}
        return {"status": "ready", **total, "models": states}

    @api.get("/metrics", summary="What Prometheus reads, under vLLM's names",
             responses=text_responses(*locked))
    async def measured() -> Response:
        return Response(metrics.text(), headers={"content-type": CONTENT_TYPE})

    tracing = asyncio.Lock()

    @api.get("/trace", summary="When requests waited, were read and decoded, and the engines' steps",
             responses=responses(TraceResponse, *locked))
    async def traced(request: Request, since: Annotated[float, Query(ge=0, allow_inf_nan=False, description=(
            "Only what was recorded after this time: the ``now`` of an earlier answer."))] = 0) -> Response:
        async with tracing:  # one at a time: a long trace takes a core for a while
            body = await asyncio.to_thread(timeline.body, since, tenant(request))
        return Response(body, media_type="application/json")
