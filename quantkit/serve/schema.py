"""Request models. Unknown keys, and known ones that aren't supported, are refused by name.

The fields are OpenAI's, with four of ours: ``top_k``, ``min_p``, ``repetition_penalty`` and
``ignore_eos``. ``null`` means the default everywhere. See
https://platform.openai.com/docs/api-reference/chat/create.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    model_validator,
)

from quantkit.errors import did_you_mean
from quantkit.runtime.sampler import MAX_STOP_LENGTH, MAX_TOKENS, MIN_TEMPERATURE, Sampling
from quantkit.serve.errors import RefusedValue

MAX_N, MAX_STOPS, MAX_LOGPROBS = 16, 16, 20
MIN_TOP_P = 1e-9
MAX_KEYS = 64
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


def _integers(value: Any) -> Any:
    return [*map(_integer, value)] if isinstance(value, list) and float in {*map(type, value)} else value


String = Annotated[str, AfterValidator(_unicode)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH), AfterValidator(_unicode)]
Ids = Annotated[list[int], Field(min_length=1, fail_fast=True), BeforeValidator(_integers)]


class RequestPart(BaseModel):
    """Base of all parts of a request: nothing is coerced, nothing is ignored in silence.

    A key whose value is null is as good as absent.

    Attributes:
        ignored: keys of OpenAI's that change nothing in the answer's text.
        neutral: keys of OpenAI's that would change the answer and aren't implemented, with the values that
            ask for nothing.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)
    ignored: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _keys(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_KEYS:
            raise ValueError(f"{len(data)} keys; at most {MAX_KEYS} are read")
        cls._first(data)
        kept = {}
        for name, value in data.items():
            field = cls.model_fields.get(name)
            if value is None:
                if field is not None and field.is_required():
                    raise RefusedValue(name, cls._null(name), "missing_parameter")
            elif field is not None:
                kept[name] = _integer(value) if field.annotation in (int, int | None) else value
            elif name not in cls.ignored and not _asks_nothing(value, cls.neutral.get(name, ())):
                raise RefusedValue(_printable(name), cls._refusal(name))
        return kept

    @classmethod
    def _first(cls, data: dict[Any, Any]) -> None:
        """Raises Refused: what better explains what is wrong than the first key would."""

    @classmethod
    def _null(cls, name: str) -> str:
        """Why null is no value of a field that must be given."""
        return f"{name} is null; it must have a value"

    @classmethod
    def _refusal(cls, name: str) -> str:
        """Why a key is refused."""
        if name in cls.neutral:
            return f"{name} is not supported, and leaving it out would change the answer"
        return f"no parameter is called {_printable(name)!r}; {did_you_mean(name[:80], cls.model_fields)}"

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """What :meth:`_keys` does, for ``/openapi.json``."""
        schema = handler.resolve_ref_schema(handler(core))
        for name, field in cls.model_fields.items():
            if not field.is_required():
                schema["properties"][name] = _nullable(schema["properties"][name])
        for name in sorted(cls.ignored):
            schema["properties"][name] = {"title": name, "description": "Accepted, and changes nothing."}
        for name, values in cls.neutral.items():
            schema["properties"][name] = {"title": name, "enum": [*values, None],
                                          "description": "Not supported beyond these values."}
        # a key that nobody knows is taken if it asks for nothing
        schema["additionalProperties"] = {"type": "null"}
        return schema


class StreamOptions(RequestPart):
    """What a stream has beside the text. Obfuscation is taken and not done."""

    include_usage: bool = False
    include_obfuscation: bool = False


class GenerationRequest(RequestPart):
    """What both kinds of request have. Defaults are OpenAI's: temperature 1, all of the distribution."""

    ignored = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
                         "prompt_cache_retention", "parallel_tool_calls"})
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
        "function_call": ("none", "auto"), "response_format": ({"type": "text"},), "logit_bias": ({},),
        "suffix": ("",), "modalities": (["text"],), "presence_penalty": (0,), "frequency_penalty": (0,),
        "audio": (), "prediction": (), "reasoning_effort": ("none",), "verbosity": ("medium",),
        "web_search_options": (), "moderation": (),
    }

    model: String
    max_tokens: int | None = Field(
        default=None, ge=1, le=MAX_TOKENS, description="Prompt and answer must fit the model's context.")
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, ge=0, le=1)
    n: int = Field(default=1, ge=1, le=MAX_N, description="Prompts by n must fit the server's queue.")
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] = Field(
        default_factory=list)
    seed: int | None = Field(default=None, ge=-INT64, le=INT64 - 1)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    top_k: int = Field(default=0, ge=0, lt=2**31)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100)
    ignore_eos: bool = False

    def sampling(self, max_tokens: int, choice: int = 0) -> Sampling:
        """Settings of choice number ``choice``; with a seed, each choice has its own that follows from it.

        Raises:
            UsageError: a value that only the sampler refuses.
        """
        # what is greedy in all but name is asked for in both of these ways
        temperature = float(self.temperature) if self.temperature >= MIN_TEMPERATURE else 0.0
        return Sampling(
            max_tokens=max_tokens, temperature=temperature, top_k=self.top_k,
            top_p=max(float(self.top_p), MIN_TOP_P), min_p=float(self.min_p), ignore_eos=self.ignore_eos,
            repetition_penalty=float(self.repetition_penalty),
            seed=None if self.seed is None else (self.seed + choice) % INT64,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop))


class ContentText(RequestPart):
    """A piece of a message. Pictures, sound and files are refused: no address is ever fetched."""

    type: Literal["text"]
    text: String

    @classmethod
    def _refusal(cls, name: str) -> str:
        return f"{_printable(name)} is not supported: a message is text"


class Message(RequestPart):
    """One turn. What an assistant's earlier answer has beside its text must be empty."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "tool_calls": ([],), "annotations": ([],), "refusal": (), "audio": (), "function_call": (),
        "tool_call_id": ()}

    role: Literal["system", "developer", "user", "assistant"]
    content: String | Annotated[list[ContentText], Field(min_length=1, fail_fast=True)]
    name: Annotated[str, Field(max_length=64), AfterValidator(_unicode)] | None = None

    @classmethod
    def _first(cls, data: dict[Any, Any]) -> None:
        if data.get("role") in ("tool", "function"):
            raise RefusedValue("role",
                               f"messages of the role {data['role']!r} are not supported: the model is "
                               "given no tools, so there are no results of theirs")
        calls = data.get("tool_calls")
        if calls is not None and calls != []:
            raise RefusedValue("tool_calls", cls._refusal("tool_calls"))

    @classmethod
    def _null(cls, name: str) -> str:
        return super()._null(name) if name != "content" else (
            "content is null; a message must have a text (only one with tool_calls may do without, and "
            "tool_calls are not supported)")

    @classmethod
    def _refusal(cls, name: str) -> str:
        if name in cls.neutral:
            return f"{name} is not supported in a message"
        return super()._refusal(name)

    def plain(self) -> dict[str, str]:
        """The message as a chat template expects it; ``developer`` is OpenAI's newer word for ``system``."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text,
                **({} if self.name is None else {"name": self.name})}


class ChatRequest(GenerationRequest):
    """Body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(
        default=None, ge=1, le=MAX_TOKENS, description="OpenAI's newer name of max_tokens; if both are given "
                                                       "they must be equal.")
    logprobs: bool = False
    top_logprobs: int | None = Field(
        default=None, ge=0, le=MAX_LOGPROBS, description="Needs logprobs: true.")

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise RefusedValue("top_logprobs", "top_logprobs needs logprobs: true", "invalid_value")
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise RefusedValue("max_tokens", "max_tokens and max_completion_tokens differ; give one",
                               "invalid_value")
        return self

    @property
    def wanted(self) -> int | None:
        """Most new tokens; ``None``: as many as fit."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(GenerationRequest):
    """Body of ``/v1/completions``."""

    prompt: (String | Annotated[list[String], Field(min_length=1, fail_fast=True)] | Ids
             | Annotated[list[Ids], Field(min_length=1, fail_fast=True)])
    max_tokens: int = Field(
        default=16, ge=0, le=MAX_TOKENS, description="Prompt and answer must fit the model's context.")
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False
    best_of: int | None = Field(default=None, ge=1, le=MAX_N, description="Must be equal to n.")

    @model_validator(mode="after")
    def _consistent(self) -> CompletionRequest:
        if self.best_of not in (None, self.n):
            raise RefusedValue("best_of", "best_of other than n is not supported")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or more, as text or ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        ids = [item for item in prompt if isinstance(item, int)]
        return [ids] if len(ids) == len(prompt) else [item for item in prompt if not isinstance(item, int)]


def _asks_nothing(value: Any, values: tuple[Any, ...]) -> bool:
    """Whether it is one of ``values``; false is not 0."""
    return any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
               for allowed in values)


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """The same, or null."""
    if "anyOf" in schema:
        options = [option for option in schema["anyOf"] if option != {"type": "null"}]
        return {**schema, "anyOf": [*options, {"type": "null"}]}
    about: dict[str, Any] = {key: schema[key] for key in ("title", "description", "default") if key in schema}
    rule = {key: value for key, value in schema.items() if key not in about}
    return {**about, "anyOf": [rule, {"type": "null"}]}


def _printable(name: str) -> str:
    return name[:80].encode("utf-8", "replace").decode()
