"""``/trace``: what requests and engines did when, and how the KV cache's memory is used now."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any, Literal

from pydantic import Field

from quantkit.runtime.trace import RequestSpan, StepSpan
from quantkit.serving.answers import Count, ResponsePart
from quantkit.serving.models import ServedEngine, ServedModels

Seconds = Annotated[float, Field(ge=0)]


class EngineStats(ResponsePart):
    """What an engine is doing, and its KV cache. A page has 64 slots of one KV head in one layer."""

    running: Count
    waiting: Count
    max_batch: Count
    max_queue: Count
    kv_allocated_bytes: Count
    kv_used_bytes: Count
    tokens_generated: Count
    prompt_tokens: Count
    steps: Count
    preemptions: Count
    prefix_queries: Count
    prefix_hits: Count
    prefix_cache_bytes: Count
    drafted: Count
    accepted: Count
    block_size: Annotated[int, Field(ge=1, description=(
        "Tokens of a block, if the model writes blocks: a span's drafted are masks then, accepted what it "
        "committed."))]
    kv_pages_used: Count
    kv_pages_shared: Annotated[int, Field(ge=0, description=(
        "Pages that several of requests and prefixes hold."))]
    kv_pages_total: Annotated[int | None, Field(ge=0, description="Null where the cache grows.")]
    kv_bytes_per_token: Count
    kv_bytes_per_token_bf16: Count


class TracedSpan(ResponsePart):
    """What a request did for a while. Keys that don't apply to its kind are left out."""

    request: Annotated[str, Field(description="The answer's id.")]
    choice: Annotated[int, Field(ge=0, description="Where it has several.")] = 0
    kind: Literal["queue", "prefill", "decode", "preempted", "end"]
    start: Seconds
    end: Seconds
    tokens: Count = 0
    cached: Count = 0
    drafted: Count = 0
    accepted: Count = 0
    reason: Literal["stop", "length", "cancelled", "error"] = "stop"


class TracedStep(ResponsePart):
    """One step of an engine."""

    start: Seconds
    end: Seconds
    decode_rows: Count
    prompt_tokens: Count
    drafted: Count
    accepted: Count
    tokens: Count


class ModelTrace(ResponsePart):
    """What one model did."""

    model: str
    stats: EngineStats
    spans: list[TracedSpan]
    steps: list[TracedStep]


class TraceResponse(ResponsePart):
    """The traces of all models, in seconds since the server started."""

    now: Seconds
    models: list[ModelTrace]


class Timeline:
    """The traces of a server's models on one clock, which is 0 now.

    Args:
        models: The models that are served.
    """

    def __init__(self, models: ServedModels) -> None:
        self._models, self._origin = models, time.perf_counter()

    def body(self, since: float, tenant: bytes = b"") -> bytes:
        """The answer, with what was recorded after ``since``, seconds, of the requests of a tenant.

        Each span is written by itself, because no other thread runs while ``json.dumps`` does.
        """
        until = time.perf_counter()
        models = b",".join(self._written(model, since + self._origin, until, tenant)
                           for model in self._models)
        return b'{"now":%s,"models":[%s]}' % (_json(until - self._origin), models)

    def _written(self, model: ServedEngine, since: float, until: float, tenant: bytes) -> bytes:
        spans: list[bytes] = []
        steps: list[bytes] = []
        for span in model.engine.trace.read(since, until):
            if isinstance(span, RequestSpan):
                if span.label.tenant == tenant:
                    spans.append(_json(self._span(span)))
            else:
                steps.append(_json(span._asdict() | self._times(span)))
        return b'{"model":%s,"stats":%s,"spans":[%s],"steps":[%s]}' % (
            _json(model.name), _json(_stats(model)), b",".join(spans), b",".join(steps))

    def _span(self, span: RequestSpan) -> dict[str, Any]:
        choice = {} if span.label.choice is None else {"choice": span.label.choice}
        return {"request": span.label.id, **choice, "kind": span.kind, **self._times(span), **span.details}

    def _times(self, span: RequestSpan | StepSpan) -> dict[str, float]:
        return {"start": round(span.start - self._origin, 6), "end": round(span.end - self._origin, 6)}


def _stats(model: ServedEngine) -> dict[str, int | None]:
    stats, cache = model.engine.stats(), model.engine.cache
    return {**stats, "kv_pages_total": None if model.engine.reservation is None else stats["kv_pages_total"],
            "kv_bytes_per_token": cache.bytes_per_token,
            "kv_bytes_per_token_bf16": cache.bytes_per_token_16bit}


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
