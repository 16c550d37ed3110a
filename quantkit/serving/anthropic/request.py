"""Bodies of ``/v1/messages`` → :class:`~quantkit.serving.conversation.Conversation`.

See https://docs.anthropic.com/en/api/messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from quantkit.serving.anthropic.blocks import MessageParam, Text, TextBlock, plain_text
from quantkit.serving.conversation import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Conversation,
    Description,
    ToolName,
    choose_tools,
)
from quantkit.serving.errors import RefusedValue
from quantkit.serving.ignored import IGNORED
from quantkit.serving.schema import JsonObject, LeftOutPart, RequestPart, String, kind_tag
from quantkit.serving.settings import (
    FITS,
    KV,
    CacheSalt,
    Priority,
    Stops,
    TokenLimit,
    TopK,
    sampling,
    token_limit,
)
from quantkit.serving.template_options import Effort, TemplateOptions, ThinkingHint, check_options
from quantkit.structure.grammar import Structure
from quantkit.structure.turns import Tool


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
        """In no API's words."""
        return Tool(self.name, self.description or "", self.input_schema, self.strict)


class AnthropicTool(LeftOutPart):
    """A tool whose schema only Anthropic's models know, or that another server runs itself."""

    supported = ("custom",)


def _kind(tool: Any) -> str:
    return kind_tag(tool, AnthropicTool.supported, "custom")


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
        Discriminator(_kind)]], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(default_factory=list)
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
        choice, wanted = self.tool_choice, self.output_config.format
        structure = None if wanted is None else Structure(json_schema=wanted.schema_)
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
