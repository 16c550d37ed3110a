"""Settings of an answer that several APIs have, and how the sampler takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from quantkit.kv.spec import MAX_LENGTH as MAX_KV
from quantkit.runtime.sampler import MAX_STOP_LENGTH, MAX_TOKENS, MIN_TEMPERATURE, Sampling
from quantkit.serving.schema import INT64, Unicode, whole_numbers


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
