"""What bodies of ``/v1/chat/completions`` and ``/v1/completions`` share.

The fields are OpenAI's, vLLM's (``top_k``, ``min_p``, ``repetition_penalty``, ``ignore_eos``, ``priority``),
llama.cpp's (``n_predict``, ``repeat_penalty``, ``cache_prompt``) and one of ours (``kv``). See https://platform.openai.com/docs/api-reference/chat/create.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from quantkit.runtime.sampler import MAX_BIASES, Sampling
from quantkit.serving.openai.structured import StructuredFields
from quantkit.serving.schema import INT64, RequestPart, String
from quantkit.serving.settings import (
    FITS,
    KV,
    CacheSalt,
    Priority,
    Stop,
    StopIds,
    Stops,
    TokenLimit,
    TopK,
    sampling,
)

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
