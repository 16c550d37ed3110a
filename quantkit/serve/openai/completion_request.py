"""Body of ``/v1/completions``."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, model_validator

from quantkit.runtime.sampler import MAX_TOKENS
from quantkit.serve.errors import RefusedValue
from quantkit.serve.openai.generation import MAX_LOGPROBS, MAX_N, GenerationRequest
from quantkit.serve.schema import Inputs, split_inputs


class CompletionRequest(GenerationRequest):
    """Body of ``/v1/completions``."""

    ignored = GenerationRequest.ignored | {"parallel_tool_calls"}
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        **GenerationRequest.neutral, "tools": ([],), "tool_choice": ("none", "auto")}

    prompt: Inputs
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
        return split_inputs(self.prompt)
