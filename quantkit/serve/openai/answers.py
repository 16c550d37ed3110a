"""Response models, as ``/openapi.json`` describes them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
Finish = Literal["stop", "length"]


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


class Usage(ResponsePart):
    """Tokens; a prompt counts once."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count


class ScoredToken(ResponsePart):
    """A token and its log-probability; ``bytes`` is null for a part of a character."""

    token: str
    logprob: float
    bytes: list[Annotated[int, Field(ge=0, le=255)]] | None


class ChosenToken(ScoredToken):
    """The same with its alternatives."""

    top_logprobs: list[ScoredToken]


class ChatLogprobs(ResponsePart):
    """Log-probabilities of all tokens of a choice."""

    content: list[ChosenToken]
    refusal: None


class AssistantMessage(ResponsePart):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(ResponsePart):
    """One of ``n``."""

    index: Count
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatCompletion(ResponsePart):
    """The next turn of a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class MessageDelta(ResponsePart):
    """What is new of a turn."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None


class ChatDelta(ResponsePart):
    """What is new of one choice; the last has a reason."""

    index: Count
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class ChatChunk(ResponsePart):
    """An event of a streamed turn; with ``include_usage`` the last one has the usage and no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatDelta]
    usage: Usage | None = None


class TextLogprobs(ResponsePart):
    """Log-probabilities of all tokens of a choice, one entry each; the first token of a prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class TextChoice(ResponsePart):
    """One of the prompts' ``n``."""

    index: Count
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish


class TextCompletion(ResponsePart):
    """The continuations of one or more prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class TextDelta(ResponsePart):
    """What is new of one choice; the last has a reason."""

    index: Count
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish | None


class TextChunk(ResponsePart):
    """An event of a streamed continuation; the usage comes as in :class:`ChatChunk`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextDelta]
    usage: Usage | None = None


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
    """The list of models, which has one entry."""

    object: Literal["list"]
    data: list[ServedModel]


class HealthResponse(ResponsePart):
    """The process lives."""

    status: Literal["ok"]


class ReadyResponse(ResponsePart):
    """Requests are taken; how many run and wait, and what they take."""

    status: Literal["ready"]
    running: Count
    waiting: Count
    max_batch: Count
    max_queue: Count
    kv_allocated_bytes: Count
    tokens_generated: Count
