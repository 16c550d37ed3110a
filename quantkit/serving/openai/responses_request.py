"""Body of ``/v1/responses`` → :class:`~quantkit.serving.conversation.Conversation`.

Nothing is kept between requests: ``store`` changes nothing, and ``previous_response_id`` is refused. See
https://platform.openai.com/docs/api-reference/responses/create.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from quantkit.serving.conversation import (
    MAX_MESSAGES,
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
from quantkit.serving.ignored import IGNORED, safe
from quantkit.serving.openai.chat_request import FunctionName
from quantkit.serving.openai.generation import STRICT, JsonObjectFormat, TextFormat
from quantkit.serving.openai.response_tools import INPUT, ClientTool, ResponseTools, client_tools, seen_name
from quantkit.serving.schema import (
    FITS,
    INT64,
    KV,
    CacheSalt,
    JsonObject,
    LeftOutPart,
    Priority,
    RequestPart,
    String,
    TextPart,
    TokenLimit,
    TopK,
    Unicode,
    plain_text,
    sampling,
    token_limit,
)
from quantkit.structure.grammar import Structure
from quantkit.structure.turns import Tool

Status = Literal["in_progress", "completed", "incomplete"]


class ItemText(TextPart):
    """A piece of a text. Pictures, sound and files are refused: no address is ever fetched."""

    ignored = TextPart.ignored | {"annotations", "logprobs"}

    type: Literal["input_text", "output_text", "text"]
    text: String


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
        return called(seen_name(self.name, self.namespace), {INPUT: self.input}, self.call_id)


class ShellCallItem(Item):
    """A command that another server's model had the client run."""

    type: Literal["local_shell_call"]
    call_id: CallId
    action: JsonObject

    def called(self) -> dict[str, Any]:
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
    default = "message"

    @classmethod
    def tag(cls, part: Any) -> str:
        """The same, with one tag for outputs of all kinds."""
        tag = super().tag(part)
        return "output[]" if tag.removesuffix("[]") in OUTPUTS else tag


InputItem = Annotated[
    Annotated[MessageItem, Tag("message[]")] | Annotated[FunctionCallItem, Tag("function_call[]")]
    | Annotated[CustomCallItem, Tag("custom_tool_call[]")]
    | Annotated[ShellCallItem, Tag("local_shell_call[]")] | Annotated[OutputItem, Tag("output[]")]
    | Annotated[ReasoningItem, Tag("reasoning[]")]
    | Annotated[AdditionalToolsItem, Tag("additional_tools[]")] | Annotated[OtherItem, Tag("other[]")],
    Discriminator(OtherItem.tag)]


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
            messages.append({"role": "tool", "tool_call_id": item.call_id,
                             "content": plain_text(item.output)})
            continue
        if isinstance(item, MessageItem) and item.role != "assistant":
            turn = None
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": plain_text(item.content)})
            continue
        text = plain_text(item.content) if isinstance(item, MessageItem) else ""
        if turn is None or (text and turn["content"]):
            turn = {"role": "assistant", "content": ""}
            messages.append(turn)
        turn["content"] += text
        if isinstance(item, ReasoningItem) and item.content:
            turn["reasoning_content"] = turn.get("reasoning_content", "") + plain_text(item.content)
        if isinstance(item, FunctionCallItem | CustomCallItem | ShellCallItem):
            turn.setdefault("tool_calls", []).append(item.called())
    return messages


class ResponseToolChoice(FunctionName):
    """This tool and no other."""

    type: Literal["function", "custom"]


class ResponseSchemaFormat(RequestPart):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Description | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: bool = STRICT


class TextOptions(RequestPart):
    """How the text must be."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"verbosity": ("medium",)}

    format: Annotated[TextFormat | JsonObjectFormat | ResponseSchemaFormat, Field(discriminator="type")] = \
        TextFormat(type="text")


class ReasoningOptions(RequestPart):
    """How a model thinks. A summary is never made, and all of its reasoning is sent."""

    ignored = frozenset({"summary", "generate_summary", "context"})

    effort: Effort | None = Field(
        default=None, description="Given to the chat template, if it has such a setting; none and minimal "
                                  "turn reasoning off where it has a switch.")


class ResponseStreamOptions(RequestPart):
    """Obfuscation is taken and not done."""

    include_obfuscation: bool = False


def _include(names: Any) -> Any:
    # what only another server's tools could add to the answer
    others = [name for name in names if isinstance(name, str) and name != ENCRYPTED] \
        if isinstance(names, list) and len(names) <= MAX_INCLUDE else []
    if (ignored := IGNORED.get()).strict or not others:
        return names
    for name in others:
        ignored.other(f"include ({safe(name)})")
    return [name for name in names if name not in others]


ENCRYPTED = "reasoning.encrypted_content"
MAX_INCLUDE = 16
Include = Annotated[list[Literal["reasoning.encrypted_content"]], Field(max_length=MAX_INCLUDE),
                    BeforeValidator(_include)]


class ResponsesRequest(RequestPart):
    """Body of ``/v1/responses``."""

    ignored = frozenset({"store", "service_tier", "safety_identifier", "prompt_cache_key", "user",
                         "prompt_cache_retention", "max_tool_calls"})
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "background": (False,), "conversation": (), "context_management": ([],), "moderation": (),
        "previous_response_id": (), "prompt": (), "top_logprobs": (0,), "truncation": ("disabled",),
    }
    refused = frozenset({"background", "conversation", "previous_response_id", "prompt", "top_logprobs"})

    model: String
    input: String | Annotated[list[InputItem], Field(
        min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: String | None = Field(default=None, description="A system message before all others.")
    max_output_tokens: TokenLimit | None = Field(default=None, description=FITS)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, ge=0, le=1)
    stream: bool = False
    stream_options: ResponseStreamOptions = ResponseStreamOptions()
    tools: ResponseTools = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    include: Include = Field(
        default_factory=list, description="Accepted, and changes nothing: reasoning isn't encrypted.")
    metadata: Annotated[dict[
        Annotated[str, Field(max_length=64), Unicode], Annotated[str, Field(max_length=512), Unicode]],
        Field(max_length=16)] = Field(default_factory=dict, description="Comes back with the answer.")
    seed: int | None = Field(default=None, ge=-INT64, le=INT64 - 1)
    top_k: TopK = 0
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100)
    chat_template_kwargs: TemplateOptions = Field(
        default_factory=dict, description="Further values for the model's chat template.")
    priority: Priority = 0
    kv: KV | None = None
    cache_salt: CacheSalt | None = None

    @classmethod
    def _reason_against(cls, name: str) -> str:
        if name in ("previous_response_id", "conversation"):
            return f"{name} is not supported: no response is kept here; send the earlier items in input"
        return super()._reason_against(name)

    @model_validator(mode="after")
    def _consistent(self) -> ResponsesRequest:
        self._choose()
        check_options(self.chat_template_kwargs)
        return self

    def conversation(self) -> Conversation:
        """In no API's words.

        Raises:
            UsageError: a value that only the sampler refuses.
        """
        tools, structure = self._choose()
        messages = messages_of(self.input, self.instructions)
        effort = self.reasoning.effort
        return Conversation(
            messages, sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k,
                               min_p=self.min_p, repetition_penalty=self.repetition_penalty, seed=self.seed),
            token_limit(self.max_output_tokens), 1, tools, self.parallel_tool_calls, structure, None,
            self.chat_template_kwargs, self.kv, self.priority, "input", "max_output_tokens",
            () if effort is None else (ThinkingHint("reasoning.effort", effort),), self.cache_salt)

    def client_tools(self) -> list[ClientTool]:
        """All tools that the model may be given."""
        items = enumerate(self.input if isinstance(self.input, list) else ())
        return [*client_tools(self.tools, "tools"),
                *(tool for number, item in items if isinstance(item, AdditionalToolsItem)
                  for tool in client_tools(item.tools, f"input[{number}].tools"))]

    def structure(self, tools: Sequence[Tool]) -> Structure | None:
        """What the answer must look like, if these are the tools."""
        return self._choose(tools)[1]

    def _choose(self, tools: Sequence[Tool] | None = None) -> tuple[tuple[Tool, ...], Structure | None]:
        if tools is None:
            tools = [tool.tool for tool in self.client_tools()]
        choice = self.tool_choice
        text = self.text.format
        structure = None
        if isinstance(text, JsonObjectFormat):
            structure = Structure(json_object=True)
        elif isinstance(text, ResponseSchemaFormat):
            structure = Structure(json_schema=text.schema_, strict=text.strict)
        named = choice.name if isinstance(choice, ResponseToolChoice) else None
        required = named is not None or choice == "required"
        return choose_tools(tools, named if required else str(choice), required, structure)
