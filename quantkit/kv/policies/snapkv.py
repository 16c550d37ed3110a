"""SnapKV: at the end of the prompt keep what its last queries look at, https://arxiv.org/abs/2404.14469."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field

from quantkit.kv.base import MAX_TOKENS, KVPolicy, PolicyView
from quantkit.kv.policies.scores import best, of_last_queries, tokens


class SnapKV(KVPolicy):
    """Each key head keeps the positions with the largest attention from the prompt's last queries.

    Attributes:
        budget: a number below 1 is the share of the prompt that stays, from 1 on the tokens that stay.
        window: so many last positions always stay; their queries are the ones that are asked.
        kernel: scores are averaged over so many neighbours, so that whole phrases stay.
    """

    name: ClassVar[str] = "snapkv"
    on_prefill: ClassVar[Literal["chunk", "end"] | None] = "end"
    budget: float = Field(gt=0, le=MAX_TOKENS)
    window: int = Field(default=32, ge=1, le=MAX_TOKENS)
    kernel: int = Field(default=5, ge=1, le=255)

    @property
    def queries(self) -> int:
        return self.window

    def keep(self, held: PolicyView) -> Sequence[torch.Tensor] | None:
        """The best-scored earlier positions and the window."""
        counts = [min(self.share(held), length) for length in held.lengths]
        if counts == list(held.lengths):
            return None
        return self.choose(of_last_queries(held, min(self.window, *counts), self.kernel), counts)

    def share(self, held: PolicyView) -> int:
        """How many slots stay in this layer's heads."""
        return tokens(self.budget, held.prompt)

    def choose(self, scores: torch.Tensor, counts: Sequence[int]) -> Sequence[torch.Tensor]:
        """Slots of each head.

        Args:
            scores: float32 ``[Hkv, S]``; −∞ beyond a head's length.
            counts: how many stay in each head.
        """
        return best(scores, counts)
