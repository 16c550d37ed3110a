"""Body of ``/v1/completions``."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, model_validator

from quantkit.runtime.sampler import MAX_TOKENS
from quantkit.serving.errors import RefusedValue
from quantkit.serving.openai.generation import MAX_LOGPROBS, MAX_N, GenerationRequest
from quantkit.serving.schema import Inputs, split_inputs
from quantkit.serving.settings import FITS, token_limit

DEFAULT_TOKENS = 16
"""Of an answer, as in OpenAI's API."""


class CompletionRequest(GenerationRequest):
    """Body of ``/v1/completions``."""

    ignored = GenerationRequest.ignored | {"parallel_tool_calls"}
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        **GenerationRequest.neutral, "tools": ([],), "tool_choice": ("none", "auto"),
        "reasoning_effort": ("none",)}
    refused = GenerationRequest.refused | {"tools"}

    prompt: Inputs
    max_tokens: int | None = Field(default=None, ge=-1, le=MAX_TOKENS, description=f"16 by default. {FITS}")
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False
    best_of: int | None = Field(default=None, ge=1, le=MAX_N, description="Must be equal to n.")

    @model_validator(mode="after")
    def _consistent(self) -> CompletionRequest:
        if self.best_of not in (None, self.n):
            raise RefusedValue("best_of", "best_of other than n is not supported")
        return self

    @property
    def limit(self) -> int | None:
        """Tokens of an answer; ``None``: as many as fit."""
        return token_limit(self.max_tokens, self.n_predict, DEFAULT_TOKENS)

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or more, as text or ids."""
        return split_inputs(self.prompt)
