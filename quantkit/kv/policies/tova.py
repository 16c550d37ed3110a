"""TOVA: drop what the newest query looks at least, https://arxiv.org/abs/2401.06104."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field

from quantkit.kv.base import MOST, Held, KVPolicy


class Tova(KVPolicy):
    """At most ``budget`` positions after the prompt and after every ``interval``-th decode step.

    The paper drops one position a step; here ``interval`` at a time, between which the cache holds
    up to ``interval`` more. All heads of a layer keep the same positions, the newest among them.
    """

    name: ClassVar[str] = "tova"
    on_prefill: ClassVar[Literal["chunk", "end"] | None] = "end"
    budget: int = Field(ge=2, le=MOST)
    interval: int = Field(default=32, ge=1, le=MOST)

    @property
    def every(self) -> int | None:
        return self.interval

    @property
    def queries(self) -> int:
        return 1

    def keep(self, held: Held) -> torch.Tensor | None:
        """The ``budget`` positions with the largest mean weight over all heads."""
        total = held.lengths[0]
        if total <= self.budget:
            return None
        scores = held.weights()[:, :, -1].mean((0, 1))
        scores[-1] = torch.inf
        best = scores.topk(self.budget).indices.sort().values
        return best.expand(len(held.lengths), -1)
