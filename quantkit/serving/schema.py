"""The base of all request bodies, and the fields that several APIs have.

Keys that nobody knows or that aren't supported are ignored and named, or refused by name where the server is
strict (:mod:`quantkit.serving.ignored`). ``null`` means the default everywhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.fields import FieldInfo

from quantkit.kv.spec import MAX_LENGTH as MAX_KV
from quantkit.runtime.sampler import MAX_STOP_LENGTH, MAX_TOKENS, MIN_TEMPERATURE, Sampling
from quantkit.serving.errors import RefusedValue
from quantkit.serving.ignored import IGNORED
from quantkit.support.errors import did_you_mean

MAX_KEYS = 64
MAX_JSON_BYTES, MAX_JSON_DEPTH = 2**17, 32
"""Of a JSON schema in a request: its size when it is written out, and how deep it may be."""
MAX_JSON_VALUES = MAX_JSON_BYTES // 2
"""Keys and values in it: each takes two bytes, so that no more than these can fit its size."""
INT64 = 2**63


def _unicode(text: str) -> str:
    # JSON can write half of a surrogate pair, which is no character and has no UTF-8
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text is not valid Unicode") from None
    return text


def _integer(value: Any) -> Any:
    # JSON has one kind of number: 2.0 is an integer to its schemas
    return int(value) if isinstance(value, float) and value.is_integer() else value


def whole_numbers(value: Any) -> Any:
    """A list in which integers may be written with a point."""
    return [*map(_integer, value)] if isinstance(value, list) and float in {*map(type, value)} else value


def check_json(value: dict[str, Any]) -> dict[str, Any]:
    """A JSON object of a request as it is. Raises ValueError: it is too large, too deep or not JSON."""
    count = 0
    waiting: list[tuple[Any, int]] = [(value, 1)]
    while waiting:
        item, depth = waiting.pop()
        if isinstance(item, dict | list):
            if depth > MAX_JSON_DEPTH:
                raise ValueError(f"it is deeper than {MAX_JSON_DEPTH} objects and lists")
            count += len(item) * (1 + isinstance(item, dict))
            if count > MAX_JSON_VALUES:
                raise ValueError(f"it has more than {MAX_JSON_VALUES} keys and values")
            inside = [*item, *item.values()] if isinstance(item, dict) else item
            waiting += [(part, depth + 1) for part in inside]
        elif isinstance(item, str):
            _unicode(item)
        elif isinstance(item, float) and not math.isfinite(item):
            raise ValueError("it has a number that is not finite")
    if (size := len(json.dumps(value))) > MAX_JSON_BYTES:
        raise ValueError(f"it has {size} bytes; at most {MAX_JSON_BYTES} are read")
    return value


ATTACHMENTS = frozenset({"image_url", "image", "input_audio", "audio_url", "audio", "video_url", "file",
                         "file_id", "file_data", "file_url", "source"})
"""Keys of a message's pieces that hold something else than text."""
Unicode = AfterValidator(_unicode)
String = Annotated[str, Unicode]
Ids = Annotated[list[int], Field(min_length=1, fail_fast=True), BeforeValidator(whole_numbers)]
JsonObject = Annotated[dict[str, Any], AfterValidator(check_json)]
Inputs = (String | Annotated[list[String], Field(min_length=1, fail_fast=True)] | Ids
          | Annotated[list[Ids], Field(min_length=1, fail_fast=True)])
"""One or more texts, each as text or as token ids."""


def split_inputs(inputs: str | list[Any]) -> list[str | list[int]]:
    """:data:`Inputs` as a list."""
    if isinstance(inputs, str):
        return [inputs]
    return [inputs] if isinstance(inputs[0], int) else list(inputs)


class RequestPart(BaseModel):
    """Base of all parts of a request: nothing is coerced, nothing is ignored in silence.

    A key whose value is null is as good as absent.

    Attributes:
        ignored: known keys that change nothing in the answer's text.
        neutral: known keys that would change the answer and aren't implemented, with the values that ask for
            nothing. Other values are ignored and named, or refused by a strict server.
        refused: keys that are refused by any server, because an answer without them would be to something
            else.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)
    ignored: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}
    refused: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _keys(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_KEYS:
            raise ValueError(f"{len(data)} keys; at most {MAX_KEYS} are read")
        cls._check_object(data)
        kept = {}
        fields = cls._fields()
        ignored = IGNORED.get()
        for name, value in data.items():
            field = fields.get(name)
            if value is None:
                if field is not None and field.is_required():
                    raise RefusedValue(name, cls._reason_against_null(name), "missing_parameter")
            elif field is not None:
                cls._check_length(name, field, value)
                kept[name] = _integer(value) if field.annotation in (int, int | None) else value
            elif name not in cls.ignored and not _asks_nothing(value, cls.neutral.get(name, ())):
                if ignored.strict or name in cls.refused:
                    raise RefusedValue(printable(name), cls._reason_against(name))
                ignored.key(data, name)
        return kept

    @classmethod
    def _fields(cls) -> dict[str, FieldInfo]:
        return {field.alias or name: field for name, field in cls.model_fields.items()}

    @classmethod
    def _check_length(cls, name: str, field: FieldInfo, value: Any) -> None:
        """Raises RefusedValue: an object has more entries than may be given. Later each of them would have
        been checked first."""
        limit = next((rule.max_length for rule in field.metadata if hasattr(rule, "max_length")), None)
        if limit is not None and isinstance(value, dict) and len(value) > limit:
            raise RefusedValue(name, f"{name}: {len(value)} entries are given; at most {limit} are accepted",
                               "invalid_value")

    @classmethod
    def _check_object(cls, data: dict[Any, Any]) -> None:
        """Raises RefusedValue: what better explains what is wrong than the first key would."""

    @classmethod
    def _reason_against_null(cls, name: str) -> str:
        """Why null is no value of a field that must be given."""
        return f"{name} is null; it must have a value"

    @classmethod
    def _reason_against(cls, name: str) -> str:
        """Why a key is refused."""
        if name in cls.neutral:
            return f"{name} is not supported, and leaving it out would change the answer"
        return f"no parameter is called {printable(name)!r}; {did_you_mean(name[:80], cls._fields())}"

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """What :meth:`_keys` does, for ``/openapi.json``."""
        schema = handler.resolve_ref_schema(handler(core))
        for name, field in cls._fields().items():
            if not field.is_required():
                schema["properties"][name] = _nullable(schema["properties"][name])
        for name in sorted(cls.ignored):
            schema["properties"][name] = {"title": name, "description": "Accepted, and changes nothing."}
        lenient = not IGNORED.get().strict
        for name, values in cls.neutral.items():
            known = {"title": name, "enum": [*values, None],
                     "description": "Not supported beyond these values."}
            schema["properties"][name] = known if name in cls.refused or not lenient else {
                "title": name, "description": "Ignored, and named in the header quantkit-ignored."}
        # a strict server takes a key that nobody knows if it asks for nothing
        schema["additionalProperties"] = True if lenient else {"type": "null"}
        return schema


class TextPart(RequestPart):
    """Base of pieces of a message. Pictures, sound and files are refused: no address is ever fetched."""

    ignored = frozenset({"cache_control", "prompt_cache_breakpoint"})
    refused = ATTACHMENTS

    @classmethod
    def _reason_against(cls, name: str) -> str:
        return f"{printable(name)} is not supported: a message is text"


def plain_text(content: str | list[Any]) -> str:
    """A text, or the texts of a message's pieces."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class LeftOutPart(RequestPart):
    """Base of parts that the server has no use for, whatever they have: they are left out and named, or
    refused by a strict server.

    Attributes:
        supported: The types of the parts that may stand in their place.
        never: The types that aren't left out either, because an answer without them would be to something
            else.
        default: The type of a part that says none.
    """

    supported: ClassVar[tuple[str, ...]] = ()
    never: ClassVar[tuple[str, ...]] = ()
    default: ClassVar[str | None] = None

    @classmethod
    def tag(cls, part: Any) -> str:
        """Which class of a union reads a part: its type if that is supported, or else ``other``. Tags have
        brackets, so that errors leave them out where they name a place."""
        kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
        kind = cls.default if kind is None else kind
        return f"{kind}[]" if isinstance(kind, str) and kind in cls.supported else "other[]"

    @model_validator(mode="before")
    @classmethod
    def _keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            kind, ignored = data.get("type"), IGNORED.get()
            if ignored.strict or not isinstance(kind, str) or kind in cls.never:
                problem = "it is missing" if kind is None else f"it is {printable(str(kind))!r}"
                raise RefusedValue("type", f"{problem}; it must be one of {', '.join(cls.supported)}",
                                   "missing_parameter" if kind is None else "invalid_value", placed=True)
            ignored.part(data, kind)
        return {} if isinstance(data, dict) else data

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Any type but those that are supported or never left out."""
        schema = handler.resolve_ref_schema(handler(core))
        schema.clear()
        if IGNORED.get().strict:
            schema["not"] = {}
        else:
            other = {"type": "string", "not": {"enum": [*cls.supported, *cls.never]}}
            schema |= {"type": "object", "properties": {"type": other}, "required": ["type"],
                       "description": "Left out, and named in the header quantkit-ignored."}
        schema["title"] = cls.__name__
        return schema


def _asks_nothing(value: Any, values: tuple[Any, ...]) -> bool:
    """Whether it is one of ``values``; false is not 0."""
    return any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
               for allowed in values)


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    if "anyOf" in schema:
        options = [option for option in schema["anyOf"] if option != {"type": "null"}]
        return {**schema, "anyOf": [*options, {"type": "null"}]}
    about: dict[str, Any] = {key: schema[key] for key in ("title", "description", "default") if key in schema}
    rule = {key: value for key, value in schema.items() if key not in about}
    return {**about, "anyOf": [rule, {"type": "null"}]}


def printable(name: str) -> str:
    """A key as it may stand in a message."""
    return name[:80].encode("utf-8", "replace").decode()


def _limit(tokens: int) -> int:
    if tokens == 0:
        raise ValueError("input should be greater than 0, or -1: as many as fit")
    return tokens


MAX_STOPS = 16
MIN_TOP_P = 1e-9
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH), Unicode]
Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)]
StopIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=MAX_STOPS, fail_fast=True),
                    BeforeValidator(whole_numbers)]
KV = Annotated[str, Field(min_length=1, max_length=MAX_KV, description=(
    'How the KV cache is kept: "int8", "window(1024, sinks=4)+int8".')), Unicode]
TokenLimit = Annotated[int, Field(ge=-1, le=MAX_TOKENS, json_schema_extra={"not": {"const": 0}}),
                       AfterValidator(_limit)]
"""Tokens of an answer; −1, as in llama.cpp and Ollama: as many as fit."""
FITS = "-1: as many as fit. What the context has no room for is cut, and the header quantkit-ignored says so."
TopK = Annotated[int, Field(ge=-1, lt=2**31, description="-1 and 0: all tokens.")]
Priority = Annotated[int, Field(ge=-2**31, lt=2**31, description=(
    "Lower ones come first. Only 0 without --scheduling-policy priority."))]

MAX_SALT = 256
CacheSalt = Annotated[str, Field(min_length=1, max_length=MAX_SALT, description=(
    "Only prompts with the same salt share cached prefixes. Take a long random text.")), Unicode]


def sampling(*, temperature: float, top_p: float, top_k: int = 0, min_p: float = 0.0,
             ignore_eos: bool = False, repetition_penalty: float = 1.0, seed: int | None = None,
             stop: Sequence[str] = (), stop_token_ids: Sequence[int] = (), presence_penalty: float = 0.0,
             frequency_penalty: float = 0.0, logit_bias: Mapping[str, float] | None = None) -> Sampling:
    """Settings as the sampler takes them, from values as JSON has them.

    Raises:
        UsageError: a value that only the sampler refuses.
    """
    return Sampling(
        # what is greedy in all but name is asked for in both of these ways
        temperature=float(temperature) if temperature >= MIN_TEMPERATURE else 0.0,
        top_p=max(float(top_p), MIN_TOP_P), top_k=max(top_k, 0), min_p=float(min_p), ignore_eos=ignore_eos,
        repetition_penalty=float(repetition_penalty), seed=None if seed is None else seed % INT64,
        stop=tuple(stop), stop_token_ids=tuple(stop_token_ids), presence_penalty=float(presence_penalty),
        frequency_penalty=float(frequency_penalty),
        logit_bias=tuple((int(token), float(bias)) for token, bias in (logit_bias or {}).items()))


def token_limit(*asked: int | None) -> int | None:
    """The first :data:`TokenLimit` that is given; ``None``: as many as fit."""
    limit = next((tokens for tokens in asked if tokens is not None), None)
    return None if limit == -1 else limit
