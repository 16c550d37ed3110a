"""``/v1/embeddings``: https://platform.openai.com/docs/api-reference/embeddings."""

from __future__ import annotations

import asyncio
import base64
import json
import uuid
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from quantkit.runtime.core import EngineFull, check_ids
from quantkit.runtime.sampler import Sampling
from quantkit.serving.errors import ApiError
from quantkit.serving.metrics import ModelMetrics
from quantkit.serving.models import ServedEngine
from quantkit.serving.schema import KV, Inputs, Priority, RequestPart, String, split_inputs
from quantkit.serving.work import ChoiceJob, PromptReader, RequestWork, check_fits, labels

MAX_INPUTS, MAX_NUMBERS = 2048, 2**22
"""Of one request: texts, and numbers of all their vectors."""
QUEUE_SECONDS = 0.02
"""After which a part of the texts that found the queue full tries again."""


class EmbeddingRequest(RequestPart):
    """Body of ``/v1/embeddings``."""

    ignored: ClassVar[frozenset[str]] = frozenset({"user"})

    model: String
    input: Inputs
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(
        default=None, ge=1, description="How many numbers of each vector are kept; it is normalized again.")
    pooling: Literal["mean", "last"] = Field(
        default="last", description="The last token's hidden state, or the mean of all of them.")
    kv: KV | None = None
    priority: Priority = 0


class EmbeddingReply:
    """The vectors of one request's texts.

    Raises:
        ApiError, ContextLengthError: a text doesn't fit, or the answer would be too large.
        QuantkitError: the tokenizer fails, or an id is unknown.
    """

    def __init__(self, model: ServedEngine, body: EmbeddingRequest) -> None:
        inputs, width = split_inputs(body.input), model.loaded.config.hidden_size
        self._model = model
        self._body = body
        self._size = body.dimensions or width
        if self._size > width:
            raise ApiError(400, f"dimensions is {self._size}; the model's vectors have {width}",
                           param="dimensions", code="invalid_value")
        limit = min(MAX_INPUTS, MAX_NUMBERS // self._size)
        if len(inputs) > limit:
            raise ApiError(400, f"{len(inputs)} texts in one request; at most {limit} are accepted",
                           param="input", code="invalid_value")
        reader = PromptReader(model.loaded.tokenizer, model.context, 1, "input")
        prompts = [reader.encode(text) if isinstance(text, str) else text for text in inputs]
        for prompt in prompts:
            check_ids(model.loaded, prompt)
        if not all(prompts):
            raise ApiError(400, "a text has no tokens", param="input", code="invalid_value")
        kv, priority = model.kv(body.kv), model.priority(body.priority)
        self.jobs = [ChoiceJob(prompt, Sampling(max_tokens=1), kv=kv, priority=priority,
                               pooling=body.pooling) for prompt in prompts]
        check_fits(model.loaded, self.jobs)

    async def collect(self, metrics: ModelMetrics, tenant: bytes = b"") -> tuple[list[torch.Tensor], int]:
        """The texts' float32 vectors in their order, and the number of tokens that the prefix cache had.

        A part of the texts is queued at a time, so that a request may have more of them than can wait. Once
        the first part has found room, the others wait for theirs.

        Raises:
            EngineFull: there is no room for the first part.
            BaseException: what went wrong in the engine.
        """
        engine, start = self._model.engine, 0
        vectors: dict[int, torch.Tensor] = {}
        cached = 0
        named = labels(f"embd-{uuid.uuid4().hex}", len(self.jobs), tenant)
        while start < len(self.jobs):
            stats = engine.stats()
            size = min(stats["max_batch"], stats["max_queue"] - stats["waiting"])  # what finds room now
            if size <= 0 < start:
                await asyncio.sleep(QUEUE_SECONDS)
                continue
            part = slice(start, start + max(1, size))
            try:
                work = RequestWork(engine, self.jobs[part], metrics, named[part])
            except EngineFull:  # or a running request came to wait again meanwhile
                if not start:
                    raise
                continue
            try:
                async for event in work.events():
                    if event.done is not None:
                        assert event.done.embedding is not None
                        vectors[start + event.choice] = self._cut(event.done.embedding)
                        cached += event.done.cached_tokens
            finally:
                work.cancel()
            start += len(work.requests)
        return [vectors[number] for number in range(len(self.jobs))], cached

    def body(self, vectors: list[torch.Tensor], cached: int) -> bytes:
        """The whole answer as JSON; of many vectors it takes a while.

        Each vector is written by itself, because no other thread runs while ``json.dumps`` does.
        """
        tokens = sum(len(job.prompt) for job in self.jobs)
        data = b",".join(_json({"object": "embedding", "index": i, "embedding": self._written(vector)})
                         for i, vector in enumerate(vectors))
        usage = _json({"prompt_tokens": tokens, "total_tokens": tokens,
                       "prompt_tokens_details": {"cached_tokens": cached}})
        return b"".join([b'{"object":"list","model":', _json(self._model.name), b',"data":[', data,
                         b'],"usage":', usage, b"}"])

    def _cut(self, vector: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(vector[:self._size].float(), dim=0)

    def _written(self, vector: torch.Tensor) -> str | list[float]:
        if self._body.encoding_format == "float":
            return vector.tolist()
        return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()


def _json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
