"""What policies have in common that drop at the prompt's end and while they decode."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from quantkit.kv.base import MAX_TOKENS, KVPolicy


class DecodingPolicy(KVPolicy):
    """``budget`` positions stay after the prompt and after every ``interval``-th decode step.

    The papers drop one position a step; here ``interval`` at a time, between which the cache holds up to
    ``interval`` more.

    Attributes:
        budget: a number below 1 is a share of the prompt, from 1 on it is tokens.
    """

    on_prefill: ClassVar[Literal["chunk", "end"] | None] = "end"
    budget: float = Field(gt=0, le=MAX_TOKENS)
    interval: int = Field(default=32, ge=1, le=MAX_TOKENS)

    @property
    def every(self) -> int | None:
        return self.interval
