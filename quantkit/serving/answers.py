"""Answers that belong to no API, and the base of all, as ``/openapi.json`` describes them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]


class ResponsePart(BaseModel):
    """Base of all parts of an answer: these keys and no others."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(ResponsePart):
    """What went wrong."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str | None


class ErrorResponse(ResponsePart):
    """The body of every answer that isn't a success."""

    error: ErrorDetail


class ServedModel(ResponsePart):
    """The model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["quantkit"]
    max_model_len: Count
    chat: bool
    method: str
    dtype: str
    kv: str


class ModelList(ResponsePart):
    """The list of models."""

    object: Literal["list"]
    data: list[ServedModel]


class HealthResponse(ResponsePart):
    """The process lives."""

    status: Literal["ok"]


class ModelState(ResponsePart):
    """What one model's engine is doing."""

    running: Count
    waiting: Count
    max_batch: Count
    max_queue: Count
    kv_allocated_bytes: Count
    tokens_generated: Count


class ReadyResponse(ModelState):
    """Requests are taken; what all models are doing together, and each by itself."""

    status: Literal["ready"]
    models: dict[str, ModelState]
