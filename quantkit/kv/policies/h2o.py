"""H2O: keep the newest positions and those that got most attention so far,
https://arxiv.org/abs/2306.14048."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field

from quantkit.kv.base import PAGE, PolicyView
from quantkit.kv.policies.again import DecodingPolicy
from quantkit.kv.policies.scores import best, places, tokens


class H2O(DecodingPolicy):
    """Each key head keeps positions of its own.

    Attributes:
        recent: the share of the budget that the newest positions have.
    """

    name: ClassVar[str] = "h2o"
    tracks: ClassVar[Literal["sums", "peaks", "moments"] | None] = "sums"
    recent: float = Field(default=0.5, ge=0, le=1)

    @property
    def queries(self) -> int:
        return PAGE

    def keep(self, held: PolicyView) -> Sequence[torch.Tensor] | None:
        """The newest, and the best of the others."""
        kept = tokens(self.budget, held.prompt)
        counts = [min(kept, length) for length in held.lengths]
        if counts == list(held.lengths):
            return None
        scores = held.sums()
        at, lengths = places(held, scores.device)
        newest = at >= lengths - max(1, int(kept * self.recent))
        return best(scores.masked_fill(newest, torch.inf).masked_fill(at >= lengths, -torch.inf), counts)
