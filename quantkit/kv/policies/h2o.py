"""H2O: keep the newest positions and those that got most attention so far, https://arxiv.org/abs/2306.14048."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field

from quantkit.kv.base import MOST, PAGE, Held, KVPolicy
from quantkit.kv.policies.scores import best, places, tokens


class H2O(KVPolicy):
    """Each key head keeps ``budget`` positions after the prompt and after every ``interval``-th decode step.

    The paper drops one position a step; here ``interval`` at a time, between which the cache holds up to
    ``interval`` more.

    Attributes:
        budget: a number below 1 is a share of the prompt, from 1 on it is tokens.
        recent: the share of the budget that the newest positions have.
    """

    name: ClassVar[str] = "h2o"
    on_prefill: ClassVar[Literal["chunk", "end"] | None] = "end"
    watches: ClassVar[Literal["sums", "peaks", "moments"] | None] = "sums"
    budget: float = Field(gt=0, le=MOST)
    recent: float = Field(default=0.5, ge=0, le=1)
    interval: int = Field(default=32, ge=1, le=MOST)

    @property
    def every(self) -> int | None:
        return self.interval

    @property
    def queries(self) -> int:
        return PAGE

    def keep(self, held: Held) -> Sequence[torch.Tensor] | None:
        """The newest, and the best of the others."""
        kept = tokens(self.budget, held.prompt)
        counts = [min(kept, length) for length in held.lengths]
        if counts == list(held.lengths):
            return None
        scores = held.sums()
        at, lengths = places(held, scores.device)
        newest = at >= lengths - max(1, int(kept * self.recent))
        return best(scores.masked_fill(newest, torch.inf).masked_fill(at >= lengths, -torch.inf), counts)
