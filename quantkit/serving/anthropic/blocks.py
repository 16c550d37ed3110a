"""Blocks of messages as Anthropic's API has them, and the messages that they are for a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from quantkit.serving.conversation import CallId, ToolName, called
from quantkit.serving.errors import RefusedValue
from quantkit.serving.schema import (
    ATTACHMENTS,
    JsonObject,
    LeftOutPart,
    RequestPart,
    String,
    kind_tag,
    printable,
)

MAX_BLOCKS = 1024


class Block(RequestPart):
    """Base of all blocks. Where a prompt may be cached is no request's affair here: all of it may."""

    ignored = frozenset({"cache_control"})
    refused = ATTACHMENTS

    @classmethod
    def _refusal(cls, name: str) -> str:
        return f"{printable(name)} is not supported in a block"


class TextBlock(Block):
    """A text."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"citations": ([],)}

    type: Literal["text"]
    text: String


class ToolUseBlock(Block):
    """A call in an earlier turn."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"caller": ({"type": "direct"},), "toolset_name": ()}

    type: Literal["tool_use"]
    id: CallId
    name: ToolName
    input: JsonObject


class ReferenceBlock(Block):
    """The name of a tool that the client has found for the model, which knows it already."""

    type: Literal["tool_reference"]
    tool_name: ToolName

    @property
    def text(self) -> str:
        """For the model."""
        return f"The tool {self.tool_name} can be called.\n"


class ToolResultBlock(Block):
    """The result of a call. A result that is an error is told to the model as such."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: String | Annotated[
        list[Annotated[TextBlock | ReferenceBlock, Field(discriminator="type")]],
        Field(max_length=MAX_BLOCKS, fail_fast=True)] = ""
    is_error: bool = False


class ThinkingBlock(Block):
    """What an earlier turn thought. There are no signatures."""

    ignored = Block.ignored | {"signature"}

    type: Literal["thinking"]
    thinking: String


class RedactedThinkingBlock(Block):
    """What another server's model thought and nobody can read; it is left out."""

    ignored = Block.ignored | {"data"}

    type: Literal["redacted_thinking"]


class OtherBlock(LeftOutPart):
    """What another server's tools did, or what only that server can read. Pictures and documents are refused:
    no address is ever fetched."""

    supported = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")
    never = ("image", "document", "search_result", "container_upload")


def _kind(block: Any) -> str:
    return kind_tag(block, OtherBlock.supported)


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("text[]")] | Annotated[ToolUseBlock, Tag("tool_use[]")]
    | Annotated[ToolResultBlock, Tag("tool_result[]")] | Annotated[ThinkingBlock, Tag("thinking[]")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking[]")] | Annotated[OtherBlock, Tag("other[]")],
    Discriminator(_kind)]
Text = String | Annotated[list[TextBlock], Field(max_length=MAX_BLOCKS, fail_fast=True)]


BLOCK_ROLES = {"tool_use": "assistant", "thinking": "assistant", "redacted_thinking": "assistant",
               "tool_result": "user"}
"""Whose turns alone may have a block. A text may stand in any."""


class MessageParam(RequestPart):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: String | Annotated[list[ContentBlock], Field(
        min_length=1, max_length=MAX_BLOCKS, fail_fast=True)]

    @model_validator(mode="after")
    def _blocks_of_role(self) -> MessageParam:
        for number, block in enumerate(self.content if isinstance(self.content, list) else ()):
            if isinstance(block, OtherBlock):
                continue
            role = BLOCK_ROLES.get(block.type, self.role)
            if role != self.role:
                raise RefusedValue(
                    f"content[{number}].type", f"{block.type} blocks can't be in a turn of the role "
                    f"{self.role!r}; only {role} has them", "invalid_value")
        return self

    def plain(self) -> list[dict[str, Any]]:
        """The turn as messages that chat templates read: results of tools have messages of their own."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        messages: list[dict[str, Any]] = []
        texts: list[str] = []
        turn: dict[str, Any] = {}
        for block in self.content:
            if isinstance(block, TextBlock):
                texts.append(block.text)
            elif isinstance(block, ToolUseBlock):
                turn.setdefault("tool_calls", []).append(called(block.name, block.input, block.id))
            elif isinstance(block, ThinkingBlock):
                turn["reasoning_content"] = turn.get("reasoning_content", "") + block.thinking
            elif isinstance(block, ToolResultBlock):
                result = plain_text(block.content)
                messages.append({"role": "tool", "tool_call_id": block.tool_use_id,
                                 "content": f"Error: {result}" if block.is_error else result})
        if texts or turn:
            messages.append({"role": self.role, "content": "".join(texts), **turn})
        return messages


def plain_text(content: str | Sequence[TextBlock | ReferenceBlock]) -> str:
    """A text, or the texts of blocks."""
    return content if isinstance(content, str) else "".join(block.text for block in content)
