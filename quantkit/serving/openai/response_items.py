"""Items of ``/v1/responses``' input, and the messages that they are."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from quantkit.serving.conversation import called
from quantkit.serving.openai.response_tools import INPUT, ResponseTools, seen_name
from quantkit.serving.schema import (
    ATTACHMENTS,
    JsonObject,
    LeftOutPart,
    RequestPart,
    String,
    kind_tag,
    printable,
)
from quantkit.serving.tools import Arguments, CallId, ToolName, read_arguments

Status = Literal["in_progress", "completed", "incomplete"]


class ItemText(RequestPart):
    """A piece of a text. Pictures, sound and files are refused: no address is ever fetched."""

    ignored = frozenset({"annotations", "logprobs", "cache_control", "prompt_cache_breakpoint"})
    refused = ATTACHMENTS

    type: Literal["input_text", "output_text", "text"]
    text: String

    @classmethod
    def _refusal(cls, name: str) -> str:
        return f"{printable(name)} is not supported: a message is text"


Content = String | Annotated[list[ItemText], Field(min_length=1, fail_fast=True)]


class Item(RequestPart):
    """Base of all items."""

    ignored = frozenset({"id", "status", "internal_chat_message_metadata_passthrough"})


class MessageItem(Item):
    """A message, also one that an earlier response had as output."""

    ignored = Item.ignored | {"phase"}

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class CallItem(Item):
    """What calls of all kinds have."""

    call_id: CallId
    name: ToolName
    namespace: ToolName | None = None


class FunctionCallItem(CallItem):
    """A call that an earlier response had as output."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"caller": (), "async": (False,)}

    type: Literal["function_call"]
    arguments: Arguments

    def called(self) -> dict[str, Any]:
        """As chat templates read it."""
        return called(seen_name(self.name, self.namespace), read_arguments(self.arguments), self.call_id)


class CustomCallItem(CallItem):
    """A call of a custom tool that an earlier response had as output."""

    type: Literal["custom_tool_call"]
    input: String

    def called(self) -> dict[str, Any]:
        """The same."""
        return called(seen_name(self.name, self.namespace), {INPUT: self.input}, self.call_id)


class ShellCallItem(Item):
    """A command that another server's model had the client run."""

    type: Literal["local_shell_call"]
    call_id: CallId
    action: JsonObject

    def called(self) -> dict[str, Any]:
        """The same."""
        return called("local_shell", self.action, self.call_id)


class OutputItem(Item):
    """The result of a call."""

    ignored = Item.ignored | {"name", "caller"}

    type: Literal["function_call_output", "custom_tool_call_output", "local_shell_call_output"]
    call_id: CallId
    output: Content


class AdditionalToolsItem(Item):
    """Further tools; where they stand in the input changes nothing."""

    ignored = Item.ignored | {"role"}

    type: Literal["additional_tools"]
    tools: ResponseTools


class ReasoningText(RequestPart):
    """A piece of reasoning."""

    type: Literal["reasoning_text", "summary_text", "text"]
    text: String


class ReasoningItem(Item):
    """What an earlier response thought."""

    ignored = Item.ignored | {"encrypted_content", "summary"}

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(max_length=64)] = Field(default_factory=list)


OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")


class OtherItem(LeftOutPart):
    """What other servers' tools did (``web_search_call``, …) and items that only they can read. A reference
    is refused, because nothing is kept here that it could mean."""

    supported = ("message", "function_call", "custom_tool_call", "local_shell_call", *OUTPUTS, "reasoning",
                 "additional_tools")
    never = ("item_reference",)


def _kind(item: Any) -> str:
    tag = kind_tag(item, OtherItem.supported, "message")
    return "output[]" if tag.removesuffix("[]") in OUTPUTS else tag


# brackets, so that errors leave out the tag where they name a place
InputItem = Annotated[
    Annotated[MessageItem, Tag("message[]")] | Annotated[FunctionCallItem, Tag("function_call[]")]
    | Annotated[CustomCallItem, Tag("custom_tool_call[]")]
    | Annotated[ShellCallItem, Tag("local_shell_call[]")] | Annotated[OutputItem, Tag("output[]")]
    | Annotated[ReasoningItem, Tag("reasoning[]")]
    | Annotated[AdditionalToolsItem, Tag("additional_tools[]")] | Annotated[OtherItem, Tag("other[]")],
    Discriminator(_kind)]


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
        if isinstance(item, OtherItem | AdditionalToolsItem):
            continue
        if isinstance(item, OutputItem):
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
        if isinstance(item, FunctionCallItem | CustomCallItem | ShellCallItem):
            turn.setdefault("tool_calls", []).append(item.called())
    return messages


def _text(content: str | list[ItemText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
