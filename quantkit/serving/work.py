"""The engine's work for one HTTP request: its prompts, and a sequence for each choice, as one stream of
events."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from quantkit.runtime.core import (
    Completion,
    ContextLengthError,
    EngineClosed,
    Pooling,
    Request,
    RequestLabel,
    TokenInfo,
)
from quantkit.runtime.engine import Engine
from quantkit.runtime.kv_manager import KVCacheManager
from quantkit.runtime.loader import LoadedModel
from quantkit.runtime.sampler import Sampling
from quantkit.serving.errors import ApiError
from quantkit.serving.metrics import ModelMetrics, RequestClock
from quantkit.structure.base import TokenConstraint
from quantkit.text.tokenizer import Tokenizer

HEAD_CHARACTERS = 2**16
"""Texts up to so long are encoded without looking at their beginning first."""


class PromptReader:
    """Encodes one request's prompts.

    Args:
        tokenizer: The model's tokenizer.
        context: The tokens that prompt and answer have together, at most.
        answer: The tokens of the context that the answer needs at least.
        param: The parameter that the texts come from.
    """

    def __init__(self, tokenizer: Tokenizer, context: int, answer: int, param: str) -> None:
        self._tokenizer = tokenizer
        self._context = context
        self._answer = answer
        self._param = param

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt.

        Raises:
            ApiError, ContextLengthError: it doesn't fit.
        """
        self.check(text)
        ids = self._tokenizer.encode(text)
        if len(ids) + self._answer > self._context:
            raise ContextLengthError(len(ids), self._answer, self._context)
        return ids

    def check(self, text: str) -> None:
        """Refuse a text that is far too long: by its length, or by what the beginning of it has in tokens.

        How long a token can be bounds how few tokens there are, where nothing of a text is dropped
        (:func:`quantkit.text.length.token_length`). Otherwise, and for a text of short tokens, growing
        beginnings are encoded: where a text is cut changes the tokens next to the cut alone, so twice the
        context is far too much. That is less work than encoding it all, up to a text that fits.

        Raises:
            ApiError: it can't fit; the message has both numbers.
        """
        least = self._tokenizer.least_tokens(text)
        if least >= self._context:  # and at least one token is to follow
            raise self._too_long(f"at least {least} (it has {len(text.encode())} bytes)")
        size = max(8 * self._context, HEAD_CHARACTERS)
        while size < len(text):
            count = len(self._tokenizer.encode(text[:size], special=False))
            if count > 2 * self._context:
                raise self._too_long(f"more than {self._context} (its first {size} characters have {count})")
            size *= 2

    def _too_long(self, tokens: str) -> ApiError:
        # clients know this error by these words
        return ApiError(400, f"This model's maximum context length is {self._context} tokens; the prompt has "
                             f"{tokens}", param=self._param, code="context_length_exceeded")


@dataclass(frozen=True)
class ChoiceJob:
    """One choice to be made.

    Attributes:
        prompt: The token ids of the prompt.
        sampling: The settings by which it is continued.
        logprobs: The number of alternatives whose log-probabilities come with the chosen token's.
        score: Whether the prompt's own tokens are scored too.
        constraint, keep_special, kv, priority, pooling: These are arguments of ``Engine.submit``.
        cache_salt: The client has chosen this; see :func:`prefix_salt`.
    """

    prompt: Sequence[int]
    sampling: Sampling
    logprobs: int | None = None
    score: bool = False
    constraint: TokenConstraint | None = None
    keep_special: frozenset[int] = frozenset()
    kv: KVCacheManager | None = None
    priority: int = 0
    pooling: Pooling | None = None
    cache_salt: str | None = None


@dataclass(frozen=True)
class TokenEvent:
    """A token of a choice, or with ``done`` its end."""

    choice: int
    token: TokenInfo | None = None
    done: Completion | None = None


class RequestWork:
    """The work for all choices of one request. It is made on the event loop and fed from the engine's thread.

    Args:
        engine: The engine that runs them.
        jobs: The choices. All are queued, or none.
        metrics: These are told how long they take.
        labels: The names of the choices in the engine's trace; see :func:`labels`.

    Attributes:
        requests: The engine's requests, one for each job.

    Raises:
        QuantkitError: the engine refuses one.
    """

    def __init__(self, engine: Engine, jobs: Sequence[ChoiceJob], metrics: ModelMetrics,
                 labels: Sequence[RequestLabel]) -> None:
        self._loop, self._metrics = asyncio.get_running_loop(), metrics
        self._stopped: set[int] = set()
        self._events: asyncio.Queue[TokenEvent | BaseException] = asyncio.Queue()
        self.requests: list[Request] = []
        try:
            for number, (job, label) in enumerate(zip(jobs, labels, strict=True)):
                self.requests.append(self._submit(engine, number, job, label))
        except BaseException:
            self.cancel()
            raise

    async def events(self) -> AsyncIterator[TokenEvent]:
        """Tokens as they come, each choice's end after its last.

        Raises:
            EngineClosed: the engine was closed under it.
            BaseException: what went wrong in the engine.
        """
        remaining = len(self.requests)
        while remaining:
            event = await self._events.get()
            if isinstance(event, BaseException):
                raise event
            if event.done is not None:
                remaining -= 1
                if event.done.finish_reason == "cancelled" and event.choice not in self._stopped:
                    raise EngineClosed("the request was ended before its time")
            yield event

    def cancel(self) -> None:
        """Cancel what still runs, because the client has left. Does nothing when all is done."""
        for request in self.requests:
            if not request.done:
                request.cancel()

    def stop(self, choice: int) -> None:
        """End one choice: it is complete as it is."""
        self._stopped.add(choice)
        self.requests[choice].cancel()

    def _submit(self, engine: Engine, number: int, job: ChoiceJob, label: RequestLabel) -> Request:
        clock = RequestClock(self._metrics)

        def on_token(token: TokenInfo) -> None:
            clock.token()
            self._tell(TokenEvent(number, token=token))

        def on_done(request: Request) -> None:
            clock.done(request)
            self._tell(TokenEvent(number, done=request.result))

        return engine.submit(job.prompt, job.sampling, logprobs=job.logprobs, echo=job.score, kv=job.kv,
                             priority=job.priority, pooling=job.pooling, constraint=job.constraint,
                             keep_special=job.keep_special, label=label,
                             cache_salt=prefix_salt(label.tenant, job.cache_salt), on_token=on_token,
                             on_done=on_done, on_error=self._tell)

    def _tell(self, event: TokenEvent | BaseException) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server is gone
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)


def labels(answer: str, count: int, tenant: bytes = b"") -> list[RequestLabel]:
    """Names of an answer's choices in the engine's trace: its id, which of ``count`` choices it is, and whose
    request it answers."""
    return [RequestLabel(answer, choice if count > 1 else None, tenant) for choice in range(count)]


def prefix_salt(tenant: bytes, salt: str | None) -> bytes:
    """The salt of a request's prefixes: of its API key (:data:`~quantkit.serving.guard.TENANT`) and of what
    the client chose."""
    return hashlib.sha256(b"salt:" + tenant + (salt or "").encode()).digest() if tenant or salt else b""


def check_size(jobs: int, limit: int) -> None:
    """Raises ApiError if this number of choices can never fit into the queue at once."""
    if jobs > limit:
        raise ApiError(400, f"{jobs} answers in one request; at most {limit} can wait at once",
                       param="n", code="too_many_choices")


def check_fits(loaded: LoadedModel, jobs: Sequence[ChoiceJob]) -> None:
    """Raises ContextLengthError if a prompt and its answer don't fit, before anything is queued."""
    context = loaded.config.max_position_embeddings
    for job in jobs:
        if len(job.prompt) + job.sampling.max_tokens > context:
            raise ContextLengthError(len(job.prompt), job.sampling.max_tokens, context)
