"""Answers of ``/v1/responses``, as ``/openapi.json`` describes them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict

from quantkit.serving.answers import Count, ResponsePart

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
