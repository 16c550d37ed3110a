"""Items of ``/v1/responses``' input, and the messages that they are."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from quantkit.serve.conversation import called
from quantkit.serve.schema import RequestPart, String, printable
from quantkit.serve.tools import Arguments, CallId, ToolName, read_arguments

Status = Literal["in_progress", "completed", "incomplete"]


class ItemText(RequestPart):
    """A piece of a text. Pictures, sound and files are refused: no address is ever fetched."""

    ignored = frozenset({"annotations", "logprobs"})

    type: Literal["input_text", "output_text", "text"]
    text: String

    @classmethod
    def _refusal(cls, name: str) -> str:
        return f"{printable(name)} is not supported: a message is text"


Content = String | Annotated[list[ItemText], Field(min_length=1, fail_fast=True)]


class MessageItem(RequestPart):
    """A message, also one that an earlier response had as output."""

    ignored = frozenset({"id", "status", "phase"})

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class FunctionCallItem(RequestPart):
    """A call that an earlier response had as output."""

    ignored = frozenset({"id", "status"})
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"namespace": (), "caller": (), "async": (False,)}

    type: Literal["function_call"]
    call_id: CallId
    name: ToolName
    arguments: Arguments


class FunctionOutputItem(RequestPart):
    """The result of a call."""

    ignored = frozenset({"id", "status"})
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"caller": ()}

    type: Literal["function_call_output"]
    call_id: CallId
    output: Content


class ReasoningText(RequestPart):
    """A piece of reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: String


class ReasoningItem(RequestPart):
    """What an earlier response thought."""

    ignored = frozenset({"id", "status", "encrypted_content", "summary"})

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(max_length=64)] = Field(default_factory=list)


def _kind(item: Any) -> str | None:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return f"{kind or 'message'}[]" if isinstance(kind, str | None) else None


# brackets, so that errors leave out the tag where they name a place
InputItem = Annotated[
    Annotated[MessageItem, Tag("message[]")] | Annotated[FunctionCallItem, Tag("function_call[]")]
    | Annotated[FunctionOutputItem, Tag("function_call_output[]")]
    | Annotated[ReasoningItem, Tag("reasoning[]")],
    Discriminator(_kind, custom_error_type="item_type", custom_error_message=(
        "its type is none of those that are supported: message, function_call, function_call_output, "
        "reasoning"))]


def messages_of(items: str | list[Any], instructions: str | None) -> list[dict[str, Any]]:
    """Messages as chat templates read them.

    Reasoning, text and calls that follow each other are one turn of the assistant's.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    turn: dict[str, Any] | None = None  # the assistant's, still open
    for item in items:
        if isinstance(item, FunctionOutputItem):
            turn = None
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            continue
        if isinstance(item, MessageItem) and item.role != "assistant":
            turn = None
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": _text(item.content)})
            continue
        text = _text(item.content) if isinstance(item, MessageItem) else ""
        if turn is None or (text and turn["content"]):
            turn = {"role": "assistant", "content": ""}
            messages.append(turn)
        turn["content"] += text
        if isinstance(item, ReasoningItem) and item.content:
            turn["reasoning_content"] = turn.get("reasoning_content", "") + "".join(
                part.text for part in item.content)
        if isinstance(item, FunctionCallItem):
            turn.setdefault("tool_calls", []).append(
                called(item.name, read_arguments(item.arguments), item.call_id))
    return messages


def _text(content: str | list[ItemText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
