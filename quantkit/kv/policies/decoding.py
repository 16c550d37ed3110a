"""Policies that also drop positions while they decode."""

from __future__ import annotations

from pydantic import Field

from quantkit.kv.base import MAX_TOKENS
from quantkit.kv.policies.score_policy import ScorePolicy


class DecodingPolicy(ScorePolicy):
    """``budget`` positions stay after the prompt and after every ``interval``-th decode step.

    The papers drop one position a step. Here ``interval`` positions are dropped at a time; between two times
    the cache holds up to ``interval`` more.

    Attributes:
        interval: decode steps between two times.
    """

    interval: int = Field(default=32, ge=1, le=MAX_TOKENS)

    @property
    def decode_interval(self) -> int | None:
        return self.interval
