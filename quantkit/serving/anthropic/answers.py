"""Answers of ``/v1/messages``, as ``/openapi.json`` describes them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict

from quantkit.serving.answers import Count, ResponsePart


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
