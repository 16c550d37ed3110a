"""What bodies of ``/v1/chat/completions`` and ``/v1/completions`` share: settings of the answer, and what it
must look like (OpenAI's ``response_format`` and vLLM's ``structured_outputs``).

The fields are OpenAI's, vLLM's (``top_k``, ``min_p``, ``repetition_penalty``, ``ignore_eos``, ``priority``),
llama.cpp's (``n_predict``, ``repeat_penalty``, ``cache_prompt``) and one of ours (``kv``). See https://platform.openai.com/docs/api-reference/chat/create.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from quantkit.runtime.sampler import MAX_BIASES, Sampling
from quantkit.serving.errors import RefusedValue
from quantkit.serving.schema import (
    FITS,
    INT64,
    KV,
    MAX_JSON_BYTES,
    CacheSalt,
    JsonObject,
    Priority,
    RequestPart,
    Stop,
    StopIds,
    Stops,
    String,
    TokenLimit,
    TopK,
    Unicode,
    check_json,
    sampling,
)
from quantkit.structure.grammar import MAX_CHOICE, MAX_CHOICES, MAX_GRAMMAR, MAX_REGEX, Structure
from quantkit.support.errors import SourceError
from quantkit.support.strict_json import parse_object

Regex = Annotated[str, Field(min_length=1, max_length=MAX_REGEX), Unicode]
Grammar = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR), Unicode]
Choice = Annotated[str, Field(min_length=1, max_length=MAX_CHOICE), Unicode]
Choices = Annotated[list[Choice], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
STRICT: bool = Field(default=False, description=(
    "Whether a schema is refused if a part of it can't be kept. Otherwise the part is left out and named."))
Schema = JsonObject | Annotated[str, Field(min_length=2, max_length=MAX_JSON_BYTES), Unicode]
"""A JSON schema, or one as text."""


class NamedSchema(RequestPart):
    """A JSON schema with a name, which changes nothing."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Annotated[str, Field(max_length=2**14), Unicode] | None = None
    schema_: JsonObject = Field(default_factory=dict, alias="schema")
    strict: bool = STRICT


class TextFormat(RequestPart):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(RequestPart):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(RequestPart):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(RequestPart):
    """vLLM's: one of these."""

    ignored = frozenset({"disable_fallback"})  # there is one backend
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "structural_tag": (), "whitespace_pattern": (), "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,)}
    refused = frozenset(neutral)

    json_: Schema | None = Field(default=None, alias="json")
    json_object: bool = False
    regex: Regex | None = None
    choice: Choices | None = None
    grammar: Grammar | None = None

    def structures(self) -> list[Structure]:
        return structures(schema=self.json_, json_object=self.json_object, regex=self.regex,
                          choice=self.choice, grammar=self.grammar)


class StructuredFields(RequestPart):
    """The fields of a body that say what its answer must look like; at most one may be given."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Regex | None = None
    guided_choice: Choices | None = None
    guided_grammar: Grammar | None = None

    @model_validator(mode="after")
    def _one_structure(self) -> StructuredFields:
        if len(self._structures()) > 1:
            raise RefusedValue("structured_outputs", "more than one structure is asked for; give one of "
                               "response_format, structured_outputs and guided_…", "invalid_value")
        return self

    @property
    def structure(self) -> Structure | None:
        return next(iter(self._structures()), None)

    def _structures(self) -> list[Structure]:
        given = structures(schema=self.guided_json, regex=self.guided_regex, choice=self.guided_choice,
                           grammar=self.guided_grammar)
        if self.structured_outputs is not None:
            given += self.structured_outputs.structures()
        if isinstance(self.response_format, JsonSchemaFormat):
            schema = self.response_format.json_schema
            given.append(Structure(json_schema=schema.schema_, strict=schema.strict))
        elif isinstance(self.response_format, JsonObjectFormat):
            given += structures(json_object=True)
        return given


def structures(*, schema: dict[str, Any] | str | None = None, json_object: bool = False,
               regex: str | None = None, choice: list[str] | None = None,
               grammar: str | None = None) -> list[Structure]:
    """One for each that is given. Raises RefusedValue: a schema as text that is no JSON object."""
    given: dict[str, Any] = {"json_schema": None if schema is None else _read_schema(schema),
                             "json_object": json_object or None, "regex": regex,
                             "choice": choice and tuple(choice), "grammar": grammar}
    return [Structure(**{name: value}) for name, value in given.items() if value is not None]


def _read_schema(schema: dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(schema, dict):
        return schema
    try:
        return check_json(parse_object(schema.encode(), "the JSON schema", next="send it as an object"))
    except (SourceError, ValueError) as error:
        raise RefusedValue("guided_json", f"the schema can't be read: {error}", "invalid_value") from None


MAX_N, MAX_LOGPROBS = 16, 20
TokenId = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]


class StreamOptions(RequestPart):
    """What a stream has beside the text. Obfuscation is taken and not done."""

    include_usage: bool = False
    include_obfuscation: bool = False


class GenerationRequest(StructuredFields):
    """What both kinds of request have. Defaults are OpenAI's: temperature 1, all of the distribution."""

    ignored = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
                         "prompt_cache_retention"})
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "functions": ([],), "function_call": ("none", "auto"), "suffix": ("",), "modalities": (["text"],),
        "audio": (), "prediction": (), "verbosity": ("medium",), "web_search_options": (), "moderation": (),
        "cache_prompt": (True,),
    }
    refused = frozenset({"functions", "function_call", "suffix", "modalities", "audio"})

    model: String
    max_tokens: TokenLimit | None = Field(default=None, description=FITS)
    n_predict: TokenLimit | None = Field(default=None, description="llama.cpp's name of max_tokens.")
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, ge=0, le=1)
    n: int = Field(default=1, ge=1, le=MAX_N, description="Prompts by n must fit the server's queue.")
    stop: Stop | Stops = Field(default_factory=list)
    stop_token_ids: StopIds = Field(default_factory=list, description="Tokens that end an answer.")
    seed: int | None = Field(default=None, ge=-INT64, le=INT64 - 1)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] = Field(
        default_factory=dict, max_length=MAX_BIASES, description="By token id, written as text.")
    top_k: TopK = 0
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100)
    repeat_penalty: float | None = Field(
        default=None, ge=0.01, le=100, description="llama.cpp's name of repetition_penalty.")
    ignore_eos: bool = False
    priority: Priority = 0
    kv: KV | None = None
    cache_salt: CacheSalt | None = None

    @property
    def limit_param(self) -> str:
        """The parameter that says how long an answer may be."""
        names = ("max_completion_tokens", "max_tokens", "n_predict")
        return next((name for name in names if getattr(self, name, None) is not None), "max_tokens")

    def sampling(self) -> Sampling:
        """Settings of the first choice, without its number of tokens.

        Raises:
            UsageError: a value that only the sampler refuses.
        """
        return sampling(
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p,
            ignore_eos=self.ignore_eos, seed=self.seed,
            repetition_penalty=self.repeat_penalty or self.repetition_penalty,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop, stop_token_ids=self.stop_token_ids,
            presence_penalty=self.presence_penalty, frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias)
