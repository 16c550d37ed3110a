"""What a request may say. Unknown keys, and known ones that can't be obeyed, are refused by name.

The fields are OpenAI's, with four of ours: ``top_k``, ``min_p``, ``repetition_penalty`` and
``ignore_eos``. ``null`` means the default everywhere. See
https://platform.openai.com/docs/api-reference/chat/create.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from quantkit.errors import did_you_mean
from quantkit.runtime.sampler import MAX_STOP_LENGTH, MAX_TOKENS, MIN_TEMPERATURE, Sampling
from quantkit.serve.errors import Refused

MAX_N, MAX_STOPS, MAX_LOGPROBS = 16, 16, 20
MIN_TOP_P = 1e-9
MAX_KEYS = 64
INT64 = 2**63

IGNORED = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
                     "prompt_cache_retention", "parallel_tool_calls"})
"""Keys that change nothing in the answer's text."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "logit_bias": ({},), "suffix": ("",), "modalities": (["text"],),
    "presence_penalty": (0,), "frequency_penalty": (0,), "audio": (), "prediction": (),
    "reasoning_effort": (), "verbosity": (), "web_search_options": (), "moderation": (),
}
"""Keys of OpenAI's that would change the answer and aren't implemented, with values that ask for nothing."""


def _unicode(text: str) -> str:
    # JSON can write half of a surrogate pair, which is no character and has no UTF-8
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text is not valid Unicode") from None
    return text


String = Annotated[str, AfterValidator(_unicode)]
Stop = Annotated[String, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Ids = Annotated[list[int], Field(fail_fast=True)]


class Body(BaseModel):
    """Base of all parts of a request: nothing is coerced, nothing is ignored in silence."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _keys(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_KEYS:
            raise ValueError(f"{len(data)} keys; at most {MAX_KEYS} are read")
        kept = {}
        for name, value in data.items():
            if value is None or name in IGNORED:
                continue
            if name not in cls.model_fields:
                if name in NEUTRAL and value in NEUTRAL[name]:
                    continue
                raise Refused(_printable(name), cls._refusal(name))
            kept[name] = value
        return kept

    @classmethod
    def _refusal(cls, name: str) -> str:
        if name in NEUTRAL:
            return f"{name} is not supported, and leaving it out would change the answer"
        return f"no parameter is called {_printable(name)!r}; {did_you_mean(name[:80], cls.model_fields)}"


class StreamOptions(Body):
    """What a stream has beside the text. Obfuscation is taken and not done."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Request(Body):
    """What both kinds of request have. Defaults are OpenAI's: temperature 1, all of the distribution."""

    model: String
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, ge=0, le=1)
    n: int = Field(default=1, ge=1, le=MAX_N)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] = Field(
        default_factory=list)
    seed: int | None = Field(default=None, ge=-INT64, lt=INT64)
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
            top_p=float(self.top_p) or MIN_TOP_P, min_p=float(self.min_p), ignore_eos=self.ignore_eos,
            repetition_penalty=float(self.repetition_penalty),
            seed=None if self.seed is None else (self.seed + choice) % INT64,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop))


class Text(Body):
    """A piece of a message. Pictures, sound and files are refused: no address is ever fetched."""

    type: Literal["text"]
    text: String

    @classmethod
    def _refusal(cls, name: str) -> str:
        return f"{_printable(name)} is not supported: a message is text"


class Message(Body):
    """One turn. What an assistant's earlier answer has beside its text must be empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: String | Annotated[list[Text], Field(min_length=1, fail_fast=True)]
    name: String | None = Field(default=None, max_length=64)
    tool_calls: list[Any] | None = Field(default=None, max_length=0)
    annotations: list[Any] | None = Field(default=None, max_length=0)

    def plain(self) -> dict[str, str]:
        """As a chat template wants it; ``developer`` is OpenAI's newer word for ``system``."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text,
                **({} if self.name is None else {"name": self.name})}


class ChatRequest(Request):
    """Body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ; give one")
        return self

    @property
    def wanted(self) -> int | None:
        """Most new tokens; ``None``: as many as fit."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(Request):
    """Body of ``/v1/completions``."""

    prompt: (String | Annotated[list[String], Field(min_length=1, fail_fast=True)] | Ids
             | Annotated[list[Ids], Field(min_length=1, fail_fast=True)])
    max_tokens: int = Field(default=16, ge=0, le=MAX_TOKENS)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False
    best_of: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _consistent(self) -> CompletionRequest:
        if self.best_of not in (None, self.n):
            raise Refused("best_of", "best_of other than n is not supported")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or more, as text or ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        ids = [one for one in prompt if isinstance(one, int)]
        return [ids] if len(ids) == len(prompt) else [one for one in prompt if not isinstance(one, int)]


def _printable(name: str) -> str:
    return name[:80].encode("utf-8", "replace").decode()
