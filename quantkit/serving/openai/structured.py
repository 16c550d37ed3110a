"""What an answer must look like: OpenAI's ``response_format`` and vLLM's ``structured_outputs``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from quantkit.serving.errors import RefusedValue
from quantkit.serving.schema import MAX_JSON_BYTES, JsonObject, RequestPart, Unicode, check_json
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
        """What is asked for."""
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
        """What is asked for."""
        return next(iter(self._structures()), None)

    def _structures(self) -> list[Structure]:
        given = structures(schema=self.guided_json, regex=self.guided_regex, choice=self.guided_choice,
                           grammar=self.guided_grammar)
        if self.structured_outputs is not None:
            given += self.structured_outputs.structures()
        if isinstance(self.response_format, JsonSchemaFormat):
            asked = self.response_format.json_schema
            given.append(Structure(json_schema=asked.schema_, strict=asked.strict))
        elif isinstance(self.response_format, JsonObjectFormat):
            given += structures(json_object=True)
        return given


def structures(*, schema: dict[str, Any] | str | None = None, json_object: bool = False,
               regex: str | None = None, choice: list[str] | None = None,
               grammar: str | None = None) -> list[Structure]:
    """One for each that is given. Raises RefusedValue: a schema as text that is no JSON object."""
    asked = []
    if schema is not None:
        asked.append(Structure(json_schema=_read_schema(schema)))
    if json_object:
        asked.append(Structure(json_object=True))
    if regex is not None:
        asked.append(Structure(regex=regex))
    if choice is not None:
        asked.append(Structure(choice=tuple(choice)))
    if grammar is not None:
        asked.append(Structure(grammar=grammar))
    return asked


def _read_schema(schema: dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(schema, dict):
        return schema
    try:
        return check_json(parse_object(schema.encode(), "the JSON schema", next="send it as an object"))
    except (SourceError, ValueError) as error:
        raise RefusedValue("guided_json", f"the schema can't be read: {error}", "invalid_value") from None
