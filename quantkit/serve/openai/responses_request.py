"""Body of ``/v1/responses`` → :class:`~quantkit.serve.conversation.Conversation`.

Nothing is kept between requests: ``store`` changes nothing, and ``previous_response_id`` is refused. See
https://platform.openai.com/docs/api-reference/responses/create.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from quantkit.runtime.sampler import MAX_TOKENS
from quantkit.serve.conversation import MAX_MESSAGES, MAX_TOOLS, Conversation
from quantkit.serve.openai.response_items import InputItem, messages_of
from quantkit.serve.openai.structured import JsonObjectFormat, TextFormat
from quantkit.serve.openai.tools import FunctionName
from quantkit.serve.schema import INT64, JsonObject, RequestPart, String, Unicode
from quantkit.serve.settings import KV, CacheSalt, Priority, sampling
from quantkit.serve.template_options import TemplateOptions, check_options
from quantkit.serve.tools import Description, ToolName, choose_tools
from quantkit.structure.grammar import Structure
from quantkit.structure.turns import Tool


class ResponseTool(RequestPart):
    """A function that the model may call. Tools that a server runs itself are refused: nothing is fetched."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"defer_loading": (False,)}

    type: Literal["function"]
    name: ToolName
    description: Description | None = None
    parameters: JsonObject = Field(default_factory=dict, description="JSON schema of its arguments.")
    strict: bool = False

    def tool(self) -> Tool:
        """In no API's words."""
        return Tool(self.name, self.description or "", self.parameters, self.strict)


class ResponseFunctionChoice(FunctionName):
    """This function and no other."""

    type: Literal["function"]


class ResponseSchemaFormat(RequestPart):
    """JSON that a schema describes."""

    ignored = frozenset({"strict"})

    type: Literal["json_schema"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Description | None = None
    schema_: JsonObject = Field(alias="schema")


class TextOptions(RequestPart):
    """How the text must be."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"verbosity": ("medium",)}

    format: Annotated[TextFormat | JsonObjectFormat | ResponseSchemaFormat, Field(discriminator="type")] = \
        TextFormat(type="text")


class ReasoningOptions(RequestPart):
    """How a model thinks, which is its own affair; a summary is never made."""

    ignored = frozenset({"summary", "generate_summary"})
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"effort": ("none",)}


class ResponseStreamOptions(RequestPart):
    """Obfuscation is taken and not done."""

    include_obfuscation: bool = False


class ResponsesRequest(RequestPart):
    """Body of ``/v1/responses``."""

    ignored = frozenset({"store", "service_tier", "safety_identifier", "prompt_cache_key", "user",
                         "prompt_cache_retention", "max_tool_calls"})
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "background": (False,), "conversation": (), "context_management": ([],), "moderation": (),
        "previous_response_id": (), "prompt": (), "top_logprobs": (0,), "truncation": ("disabled",),
    }

    model: String
    input: String | Annotated[list[InputItem], Field(
        min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: String | None = Field(default=None, description="A system message before all others.")
    max_output_tokens: int | None = Field(
        default=None, ge=1, le=MAX_TOKENS, description="Prompt and answer must fit the model's context.")
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, ge=0, le=1)
    stream: bool = False
    stream_options: ResponseStreamOptions = ResponseStreamOptions()
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(
        default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | ResponseFunctionChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Field(max_length=8)] = Field(
        default_factory=list, description="Accepted, and changes nothing: reasoning isn't encrypted.")
    metadata: Annotated[dict[
        Annotated[str, Field(max_length=64), Unicode], Annotated[str, Field(max_length=512), Unicode]],
        Field(max_length=16)] = Field(default_factory=dict, description="Comes back with the answer.")
    seed: int | None = Field(default=None, ge=-INT64, le=INT64 - 1)
    top_k: int = Field(default=0, ge=0, lt=2**31)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100)
    chat_template_kwargs: TemplateOptions = Field(
        default_factory=dict, description="Further values for the model's chat template.")
    priority: Priority = 0
    kv: KV | None = None
    cache_salt: CacheSalt | None = None

    @classmethod
    def _refusal(cls, name: str) -> str:
        if name in ("previous_response_id", "conversation"):
            return f"{name} is not supported: no response is kept here; send the earlier items in input"
        return super()._refusal(name)

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
        return Conversation(
            messages, sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k,
                               min_p=self.min_p, repetition_penalty=self.repetition_penalty, seed=self.seed),
            self.max_output_tokens, 1, tools, self.parallel_tool_calls, structure, None,
            self.chat_template_kwargs, self.kv, self.priority, "input", self.cache_salt)

    def _choose(self) -> tuple[tuple[Tool, ...], Structure | None]:
        choice, wanted, structure = self.tool_choice, self.text.format, None
        if isinstance(wanted, JsonObjectFormat):
            structure = Structure(json_object=True)
        elif isinstance(wanted, ResponseSchemaFormat):
            structure = Structure(json_schema=wanted.schema_)
        named = choice.name if isinstance(choice, ResponseFunctionChoice) else None
        required = named is not None or choice == "required"
        return choose_tools([tool.tool() for tool in self.tools],
                            named if required else str(choice), required, structure)
