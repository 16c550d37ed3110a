"""Answers of all APIs, as ``/openapi.json`` describes them: those that belong to none first."""

from __future__ import annotations

from typing import Annotated, Any, Literal

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


Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(ResponsePart):
    """A text."""

    type: Literal["output_text"]
    text: str
    annotations: list[None]
    logprobs: list[None]


class MessageOutput(ResponsePart):
    """A message of the assistant's."""

    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    content: list[OutputText]
    status: Status


class ReasoningTextPart(ResponsePart):
    """A text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningOutput(ResponsePart):
    """What the model thought; there is never a summary."""

    type: Literal["reasoning"]
    id: str
    summary: list[None]
    content: list[ReasoningTextPart]
    status: Status


class FunctionCallOutput(ResponsePart):
    """A call that the client is to make; the arguments are JSON."""

    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str
    status: Status


class CustomCallOutput(ResponsePart):
    """A call of a custom tool that the client is to make."""

    type: Literal["custom_tool_call"]
    id: str
    call_id: str
    name: str
    namespace: str | None = None
    input: str
    status: Status


class InputDetails(ResponsePart):
    """Of the input's tokens."""

    cached_tokens: Count
    cache_write_tokens: Count


class OutputDetails(ResponsePart):
    """Of the output's tokens."""

    reasoning_tokens: Count


class ResponseUsage(ResponsePart):
    """Tokens."""

    input_tokens: Count
    input_tokens_details: InputDetails
    output_tokens: Count
    output_tokens_details: OutputDetails
    total_tokens: Count


class IncompleteDetails(ResponsePart):
    """Why a response is cut."""

    reason: Literal["max_output_tokens"]


class ResponseAnswer(ResponsePart):
    """A response: its output, and beside it what was asked for."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    model: str
    output: list[MessageOutput | ReasoningOutput | FunctionCallOutput | CustomCallOutput]
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    metadata: dict[str, str]
    temperature: float
    top_p: float
    max_output_tokens: int | None
    background: Literal[False]
    previous_response_id: None
    store: Literal[False]
    truncation: Literal["disabled"]
    parallel_tool_calls: bool
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    text: dict[str, Any]
    reasoning: dict[str, str | None]
    usage: ResponseUsage | None


class ResponseEvent(ResponsePart):
    """An event of a streamed response: the keys beside these are those of its type, as OpenAI has them."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: Count


Finish = Literal["stop", "length", "tool_calls"]


class PromptDetails(ResponsePart):
    """Of the prompt's tokens."""

    cached_tokens: Count


class AnswerDetails(ResponsePart):
    """Of the answer's tokens: before the reasoning's end, and drafted and right. Those that were drafted in
    vain are no part of the answer."""

    reasoning_tokens: Count
    accepted_prediction_tokens: Count
    rejected_prediction_tokens: Count


class Usage(ResponsePart):
    """Tokens; a prompt counts once."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptDetails
    completion_tokens_details: AnswerDetails


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


class AnswerFunction(ResponsePart):
    """What is called; the arguments are JSON."""

    name: str
    arguments: str


class AnswerToolCall(ResponsePart):
    """A call that the client is to make."""

    id: str
    type: Literal["function"]
    function: AnswerFunction


class AssistantMessage(ResponsePart):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[AnswerToolCall] | None = None


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


class FunctionDelta(ResponsePart):
    """What is new of a call."""

    name: str | None = None
    arguments: str


class CallDelta(ResponsePart):
    """The same, with the call's number; its first has the id and the name."""

    index: Count
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class MessageDelta(ResponsePart):
    """What is new of a turn."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


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


class TextChoiceDelta(ResponsePart):
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
    choices: list[TextChoiceDelta]
    usage: Usage | None = None


class Embedding(ResponsePart):
    """A text's vector, as numbers or as little-endian float32 in base64."""

    object: Literal["embedding"]
    index: Count
    embedding: list[float] | str


class EmbeddingUsage(ResponsePart):
    """Tokens of all texts."""

    prompt_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptDetails


class EmbeddingList(ResponsePart):
    """The texts' vectors, each of length 1."""

    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class Tokenized(ResponsePart):
    """Tokens of a text."""

    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str] | None


class Detokenized(ResponsePart):
    """The text of tokens."""

    prompt: str


class AnthropicErrorDetail(ResponsePart):
    """What went wrong."""

    type: str
    message: str


class AnthropicErrorResponse(ResponsePart):
    """The body of every answer that isn't a success."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class TextAnswer(ResponsePart):
    """A text."""

    type: Literal["text"]
    text: str


class ThinkingAnswer(ResponsePart):
    """What the model thought; the signature is empty."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseAnswer(ResponsePart):
    """A call that the client is to make."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(ResponsePart):
    """Tokens; those of the input that the prefix cache had are counted apart."""

    input_tokens: Count
    cache_read_input_tokens: Count
    cache_creation_input_tokens: Count
    output_tokens: Count


class MessageAnswer(ResponsePart):
    """The assistant's turn."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextAnswer | ThinkingAnswer | ToolUseAnswer]
    stop_reason: Literal["end_turn", "stop_sequence", "max_tokens", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class AnthropicEvent(ResponsePart):
    """An event of a streamed message: the keys beside this are those of its type, as Anthropic has them."""

    model_config = ConfigDict(extra="allow")

    type: str


class MessageTokenCount(ResponsePart):
    """How many tokens a conversation has."""

    input_tokens: Count
