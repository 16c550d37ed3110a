"""Bodies of ``/v1/messages``, with their blocks → :class:`~quantkit.serving.conversation.Conversation`.

See https://docs.anthropic.com/en/api/messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from quantkit.serving.conversation import (
    MAX_MESSAGES,
    MAX_TOOLS,
    CallId,
    Conversation,
    Description,
    Effort,
    TemplateOptions,
    ThinkingHint,
    ToolName,
    called,
    check_options,
    choose_tools,
)
from quantkit.serving.errors import RefusedValue
from quantkit.serving.ignored import IGNORED
from quantkit.serving.schema import (
    ATTACHMENTS,
    FITS,
    KV,
    CacheSalt,
    JsonObject,
    LeftOutPart,
    Priority,
    RequestPart,
    Stops,
    String,
    TokenLimit,
    TopK,
    plain_text,
    printable,
    sampling,
    token_limit,
)
from quantkit.structure.grammar import Structure
from quantkit.structure.turns import Tool

MAX_BLOCKS = 1024


class Block(RequestPart):
    """Base of all blocks. Where a prompt may be cached is no request's affair here: all of it may."""

    ignored = frozenset({"cache_control"})
    refused = ATTACHMENTS

    @classmethod
    def _reason_against(cls, name: str) -> str:
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


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("text[]")] | Annotated[ToolUseBlock, Tag("tool_use[]")]
    | Annotated[ToolResultBlock, Tag("tool_result[]")] | Annotated[ThinkingBlock, Tag("thinking[]")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking[]")] | Annotated[OtherBlock, Tag("other[]")],
    Discriminator(OtherBlock.tag)]
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


class ToolParam(RequestPart):
    """A function that the model may call. When it is loaded changes nothing: all are."""

    ignored = frozenset({"cache_control", "eager_input_streaming", "input_examples"})
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "defer_loading": (False,), "allowed_callers": (["direct"],)}

    type: Literal["custom"] = "custom"
    name: ToolName
    description: Description | None = None
    input_schema: JsonObject
    strict: bool = False

    def tool(self) -> Tool:
        return Tool(self.name, self.description or "", self.input_schema, self.strict)


class AnthropicTool(LeftOutPart):
    """A tool whose schema only Anthropic's models know, or that another server runs itself."""

    supported = ("custom",)
    default = "custom"


class AutoChoice(RequestPart):
    """The model decides, or must call any tool."""

    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool = False


class NamedChoice(RequestPart):
    """This tool and no other."""

    type: Literal["tool"]
    name: ToolName
    disable_parallel_tool_use: bool = False


class NoChoice(RequestPart):
    """No tool."""

    type: Literal["none"]


class ThinkingOn(RequestPart):
    """The model thinks first. ``max_tokens`` bounds this too; the budget by itself does not."""

    ignored = frozenset({"budget_tokens", "display"})

    type: Literal["enabled", "adaptive"]


class ThinkingOff(RequestPart):
    """It doesn't."""

    type: Literal["disabled"]


class JsonOutput(RequestPart):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(RequestPart):
    """What the answer must look like."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"task_budget": ()}

    effort: Effort | None = Field(
        default=None, description="Given to the chat template, if it has such a setting.")
    format: JsonOutput | None = None


BILLING = "x-anthropic-billing-header:"
COMMON = frozenset({"cache_control", "diagnostics", "inference_geo", "speed", "metadata", "service_tier"})


class CountRequest(RequestPart):
    """Body of ``/v1/messages/count_tokens``: what of a request is part of the prompt. All that a request for
    an answer may have beside it is accepted."""

    ignored = COMMON | {"max_tokens", "temperature", "top_p", "top_k", "stop_sequences", "stream", "priority",
                        "kv", "cache_salt"}
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "container": (), "mcp_servers": ([],), "context_management": ()}

    model: String
    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Text | None = None
    tools: Annotated[list[Annotated[
        Annotated[ToolParam, Tag("custom[]")] | Annotated[AnthropicTool, Tag("other[]")],
        Discriminator(AnthropicTool.tag)]], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(
            default_factory=list)
    tool_choice: Annotated[AutoChoice | NamedChoice | NoChoice, Field(discriminator="type")] | None = None
    thinking: Annotated[ThinkingOn | ThinkingOff, Field(discriminator="type")] | None = Field(
        default=None, description="Given to the chat template as enable_thinking.")
    output_config: OutputConfig = OutputConfig()
    chat_template_kwargs: TemplateOptions = Field(
        default_factory=dict, description="Further values for the model's chat template.")

    @model_validator(mode="after")
    def _consistent(self) -> CountRequest:
        self._choose()
        check_options(self.chat_template_kwargs)
        if self.messages[-1].role == "assistant":
            raise RefusedValue("messages", "the last message is the assistant's; going on with it is not "
                               "supported, so the last one must be the user's")
        return self

    def conversation(self) -> Conversation:
        """In no API's words. Raises UsageError: a value that only the sampler refuses."""
        tools, structure = self._choose()
        messages = [plain for message in self.messages for plain in message.plain()]
        if self.system and (text := self._system(self.system)):
            messages.insert(0, {"role": "system", "content": text})
        parallel = isinstance(self.tool_choice, NoChoice | None) or \
            not self.tool_choice.disable_parallel_tool_use
        return Conversation(messages, sampling(temperature=1.0, top_p=1.0), None, 1, tools, parallel,
                            structure, None, self.chat_template_kwargs, thinking=tuple(self._hints()))

    def _system(self, system: str | list[TextBlock]) -> str:
        if isinstance(system, str) or not system[0].text.startswith(BILLING):
            return plain_text(system)
        if (ignored := IGNORED.get()).strict:
            return plain_text(system)
        # Claude Code's accounting, which differs in each request: no prompt would begin like an earlier one
        ignored.other("system[0] (x-anthropic-billing-header)")
        return plain_text(system[1:])

    def _hints(self) -> Iterator[ThinkingHint]:
        if self.thinking is not None:
            kind = self.thinking.type
            yield ThinkingHint("thinking", kind != "disabled", wish=kind == "adaptive")
        if (effort := self.output_config.effort) is not None:
            yield ThinkingHint("output_config.effort", effort)

    def _choose(self) -> tuple[tuple[Tool, ...], Structure | None]:
        choice, output = self.tool_choice, self.output_config.format
        structure = None if output is None else Structure(json_schema=output.schema_)
        name = choice.name if isinstance(choice, NamedChoice) else None
        required = name is not None or (choice is not None and choice.type == "any")
        return choose_tools([tool.tool() for tool in self.tools if isinstance(tool, ToolParam)],
                            "none" if isinstance(choice, NoChoice) else name, required, structure)


class MessagesRequest(CountRequest):
    """Body of ``/v1/messages``."""

    ignored = COMMON

    max_tokens: TokenLimit = Field(description=FITS)
    temperature: float = Field(default=1.0, ge=0, le=1)
    top_p: float = Field(default=1.0, ge=0, le=1)
    top_k: TopK = 0
    stop_sequences: Stops = Field(default_factory=list)
    stream: bool = False
    priority: Priority = 0
    kv: KV | None = None
    cache_salt: CacheSalt | None = None

    def conversation(self) -> Conversation:
        """The same, with the settings of its answer."""
        settings = sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k,
                            stop=self.stop_sequences)
        return replace(super().conversation(), sampling=settings, max_tokens=token_limit(self.max_tokens),
                       kv=self.kv, priority=self.priority, cache_salt=self.cache_salt)
