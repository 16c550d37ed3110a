"""Bodies of ``/v1/messages`` → :class:`~quantkit.serve.conversation.Conversation`.

See https://docs.anthropic.com/en/api/messages.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from quantkit.runtime.sampler import MAX_TOKENS
from quantkit.serve.anthropic.blocks import MessageParam, Text, plain_text
from quantkit.serve.conversation import MAX_MESSAGES, MAX_TOOLS, Conversation
from quantkit.serve.errors import RefusedValue
from quantkit.serve.schema import JsonObject, RequestPart, String
from quantkit.serve.settings import KV, CacheSalt, Priority, Stops, sampling
from quantkit.serve.template_options import TemplateOptions, check_options
from quantkit.serve.tools import Description, ToolName, choose_tools
from quantkit.structure.grammar import Structure
from quantkit.structure.turns import Tool


class ToolParam(RequestPart):
    """A function that the model may call. Tools that a server runs itself are refused: nothing is fetched."""

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

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"effort": (), "task_budget": ()}

    format: JsonOutput | None = None


class CountRequest(RequestPart):
    """Body of ``/v1/messages/count_tokens``: what of a request is part of the prompt."""

    ignored = frozenset({"cache_control", "diagnostics", "inference_geo", "speed"})
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "container": (), "mcp_servers": ([],), "context_management": ()}

    model: String
    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Text | None = None
    tools: Annotated[list[ToolParam], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(
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
        if self.system:
            messages.insert(0, {"role": "system", "content": plain_text(self.system)})
        options = dict(self.chat_template_kwargs)
        if self.thinking is not None:
            options.setdefault("enable_thinking", isinstance(self.thinking, ThinkingOn))
        parallel = isinstance(self.tool_choice, NoChoice | None) or \
            not self.tool_choice.disable_parallel_tool_use
        return self._asked(messages, tools, structure, options, parallel)

    def _asked(self, messages: list[dict[str, Any]], tools: tuple[Tool, ...], structure: Structure | None,
               options: dict[str, Any], parallel: bool) -> Conversation:
        return Conversation(messages, sampling(temperature=1.0, top_p=1.0), None, 1, tools, parallel,
                            structure, None, options)

    def _choose(self) -> tuple[tuple[Tool, ...], Structure | None]:
        choice, wanted = self.tool_choice, self.output_config.format
        structure = None if wanted is None else Structure(json_schema=wanted.schema_)
        name = choice.name if isinstance(choice, NamedChoice) else None
        required = name is not None or (choice is not None and choice.type == "any")
        return choose_tools([tool.tool() for tool in self.tools],
                            "none" if isinstance(choice, NoChoice) else name, required, structure)


class MessagesRequest(CountRequest):
    """Body of ``/v1/messages``."""

    ignored = CountRequest.ignored | {"metadata", "service_tier"}

    max_tokens: int = Field(
        ge=1, le=MAX_TOKENS, description="Prompt and answer must fit the model's context.")
    temperature: float = Field(default=1.0, ge=0, le=1)
    top_p: float = Field(default=1.0, ge=0, le=1)
    top_k: int = Field(default=0, ge=0, lt=2**31)
    stop_sequences: Stops = Field(default_factory=list)
    stream: bool = False
    priority: Priority = 0
    kv: KV | None = None
    cache_salt: CacheSalt | None = None

    def _asked(self, messages: list[dict[str, Any]], tools: tuple[Tool, ...], structure: Structure | None,
               options: dict[str, Any], parallel: bool) -> Conversation:
        settings = sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k,
                            stop=self.stop_sequences)
        return Conversation(messages, settings, self.max_tokens, 1, tools, parallel, structure, None, options,
                            self.kv, self.priority, cache_salt=self.cache_salt)
