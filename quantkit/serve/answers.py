"""What is answered, as ``/openapi.json`` describes it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
Finish = Literal["stop", "length"]


class Answer(BaseModel):
    """Base of all parts of an answer: these keys and no others."""

    model_config = ConfigDict(extra="forbid")


class Fault(Answer):
    """What went wrong."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str | None


class Error(Answer):
    """Every answer that isn't a success."""

    error: Fault


class Usage(Answer):
    """Tokens; a prompt counts once."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count


class ScoredToken(Answer):
    """A token and its log-probability; ``bytes`` is null for a part of a character."""

    token: str
    logprob: float
    bytes: list[Annotated[int, Field(ge=0, le=255)]] | None


class ChosenToken(ScoredToken):
    """The same with its alternatives."""

    top_logprobs: list[ScoredToken]


class ChatLogprobs(Answer):
    """Of all tokens of a choice."""

    content: list[ChosenToken]
    refusal: None


class AnswerMessage(Answer):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Answer):
    """One of ``n``."""

    index: Count
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatCompletion(Answer):
    """The next turn of a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(Answer):
    """What is new of a turn."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None


class ChatDelta(Answer):
    """What is new of one choice; the last has a reason."""

    index: Count
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class ChatChunk(Answer):
    """An event of a streamed turn; with ``include_usage`` the last one has the usage and no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatDelta]
    usage: Usage | None = None


class TextLogprobs(Answer):
    """Of all tokens of a choice, an entry each; the first of a prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class TextChoice(Answer):
    """One of the prompts' ``n``."""

    index: Count
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish


class TextCompletion(Answer):
    """The continuations of one or more prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class TextDelta(Answer):
    """What is new of one choice; the last has a reason."""

    index: Count
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish | None


class TextChunk(Answer):
    """An event of a streamed continuation; the usage comes as in :class:`ChatChunk`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextDelta]
    usage: Usage | None = None


class ServedModel(Answer):
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


class Models(Answer):
    """All models: one."""

    object: Literal["list"]
    data: list[ServedModel]


class Health(Answer):
    """The process lives."""

    status: Literal["ok"]


class Ready(Answer):
    """Requests are taken; how many run and wait, and what they take."""

    status: Literal["ready"]
    running: Count
    waiting: Count
    max_batch: Count
    max_queue: Count
    kv_allocated_bytes: Count
    tokens_generated: Count
