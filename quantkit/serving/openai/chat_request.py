"""Body of ``/v1/chat/completions``, with its tools → :class:`~quantkit.serving.conversation.Conversation`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from quantkit.serving.conversation import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Arguments,
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
    read_arguments,
)
from quantkit.serving.errors import RefusedValue
from quantkit.serving.openai.generation import MAX_LOGPROBS, GenerationRequest
from quantkit.serving.schema import (
    JsonObject,
    LeftOutPart,
    RequestPart,
    String,
    TextPart,
    TokenLimit,
    Unicode,
    plain_text,
    printable,
    token_limit,
)
from quantkit.structure.grammar import Structure
from quantkit.structure.turns import Tool


class FunctionDefinition(RequestPart):
    """A function that the model may call."""

    name: ToolName
    description: Description | None = None
    parameters: JsonObject = Field(default_factory=dict, description="JSON schema of its arguments.")
    strict: bool = False


class FunctionTool(RequestPart):
    """A tool; functions are the only kind."""

    ignored: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    type: Literal["function"]
    function: FunctionDefinition

    def tool(self) -> Tool:
        function = self.function
        return Tool(function.name, function.description or "", function.parameters, function.strict)


class FunctionName(RequestPart):
    """Which function."""

    name: ToolName


class FunctionChoice(RequestPart):
    """This function and no other."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(RequestPart):
    """What was called."""

    name: ToolName
    arguments: Arguments


class ToolCall(RequestPart):
    """A call in an earlier turn."""

    ignored: ClassVar[frozenset[str]] = frozenset({"index"})

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction


class OtherTool(LeftOutPart):
    """A tool that another server runs itself."""

    supported = ("function",)


AnyTool = Annotated[Annotated[FunctionTool, Tag("function[]")] | Annotated[OtherTool, Tag("other[]")],
                    Discriminator(OtherTool.tag)]
Tools = Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


def plain_tools(tools: Sequence[FunctionTool | OtherTool]) -> list[Tool]:
    """Those that the model may call, in no API's words."""
    return [tool.tool() for tool in tools if isinstance(tool, FunctionTool)]


ToolChoice = Literal["none", "auto", "required"] | FunctionChoice


MAX_CALLS = 128


class ContentText(TextPart):
    """A piece of a message. Pictures, sound and files are refused: no address is ever fetched."""

    type: Literal["text"]
    text: String


class Message(RequestPart):
    """One turn: a text, an assistant's tool calls, or the result of one."""

    ignored = frozenset({"cache_control"})
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "annotations": ([],), "refusal": (), "audio": (), "function_call": ()}
    refused = frozenset({"audio", "function_call"})

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: String | Annotated[list[ContentText], Field(min_length=1, fail_fast=True)] | None = Field(
        default=None, description="Only an assistant's message with tool_calls may do without.")
    name: Annotated[str, Field(max_length=64), Unicode] | None = None
    reasoning_content: String | None = Field(
        default=None, description="What an assistant thought before it answered.")
    reasoning: String | None = Field(default=None, description="Another name of reasoning_content.")
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] = Field(
        default_factory=list, description="Of an assistant.")
    tool_call_id: CallId | None = Field(default=None, description="Which call a tool's result answers.")

    @classmethod
    def _check_object(cls, data: dict[Any, Any]) -> None:
        role, calls = data.get("role"), data.get("tool_calls")
        if role == "function":
            raise RefusedValue("role", "messages of the role 'function' are not supported; use tools and the "
                               "role 'tool'")
        for name, owner in (("tool_calls", "assistant"), ("reasoning_content", "assistant"),
                            ("reasoning", "assistant"), ("tool_call_id", "tool")):
            if isinstance(role, str) and role != owner and data.get(name) not in (None, [], ""):
                raise RefusedValue(name, f"{name} is not supported in a message of the role "
                                   f"{printable(role)!r}; only {owner} has it")
        if role == "tool" and data.get("tool_call_id") is None:
            raise RefusedValue("tool_call_id", "a tool's message must say which call it answers",
                               "missing_parameter")
        if data.get("content") is None and not (role == "assistant" and calls):
            problem = "content is null" if "content" in data else "content is missing"
            raise RefusedValue("content", f"{problem}; a message must have a text (only an assistant's with "
                               "tool_calls may do without)", "missing_parameter")

    @classmethod
    def _reason_against(cls, name: str) -> str:
        if name in cls.neutral:
            return f"{name} is not supported in a message"
        return super()._reason_against(name)

    def plain(self) -> dict[str, Any]:
        """The message as a chat template expects it; ``developer`` is OpenAI's newer word for ``system``."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role,
                                   "content": plain_text(self.content or "")}
        for name, value in (("name", self.name), ("tool_call_id", self.tool_call_id),
                            ("reasoning_content", self.reasoning_content or self.reasoning)):
            if value is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [
                called(call.function.name, read_arguments(call.function.arguments), call.id)
                for call in self.tool_calls]
        return message


class ChatRequest(GenerationRequest):
    """Body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: TokenLimit | None = Field(
        default=None, description="OpenAI's newer name of max_tokens; if both are given they must be equal.")
    logprobs: bool = False
    top_logprobs: int | None = Field(
        default=None, ge=0, le=MAX_LOGPROBS, description="Needs logprobs: true.")
    tools: Tools = Field(default_factory=list)
    tool_choice: ToolChoice | None = Field(
        default=None, description="auto if there are tools; a function must be one of them.")
    parallel_tool_calls: bool = True
    reasoning_effort: Effort | None = Field(
        default=None, description="Given to the chat template, if it has such a setting; none and minimal "
                                  "turn reasoning off where it has a switch.")
    enable_thinking: bool | None = Field(default=None, description="Whether the model is to reason first.")
    think: bool | Effort | None = Field(default=None, description="Ollama's name of both of these.")
    chat_template_kwargs: TemplateOptions = Field(
        default_factory=dict, description="Further values for the model's chat template.")

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise RefusedValue("top_logprobs", "top_logprobs needs logprobs: true", "invalid_value")
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise RefusedValue("max_tokens", "max_tokens and max_completion_tokens differ; give one",
                               "invalid_value")
        self._choose()
        check_options(self.chat_template_kwargs)
        return self

    def conversation(self) -> Conversation:
        """In no API's words.

        Raises:
            UsageError: a value that only the sampler refuses.
        """
        tools, structure = self._choose()
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        hints = tuple(ThinkingHint(name, value) for name in ("enable_thinking", "think", "reasoning_effort")
                      if (value := getattr(self, name)) is not None)
        return Conversation(
            [message.plain() for message in self.messages], self.sampling(),
            token_limit(self.max_completion_tokens, self.max_tokens, self.n_predict),
            self.n, tools, self.parallel_tool_calls, structure, logprobs, self.chat_template_kwargs, self.kv,
            self.priority, limit_param=self.limit_param, thinking=hints,
            cache_salt=self.cache_salt)

    def _choose(self) -> tuple[tuple[Tool, ...], Structure | None]:
        choice = self.tool_choice
        name = choice.function.name if isinstance(choice, FunctionChoice) else (
            None if choice == "required" else choice)
        required = choice == "required" or isinstance(choice, FunctionChoice)
        return choose_tools(plain_tools(self.tools), name, required, self.structure)
