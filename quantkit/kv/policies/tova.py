"""TOVA: drop what the newest query looks at least, https://arxiv.org/abs/2401.06104."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field

from quantkit.kv.base import MOST, Held, KVPolicy
from quantkit.kv.policies.scores import best, tokens


class Tova(KVPolicy):
    """At most ``budget`` positions after the prompt and after every ``interval``-th decode step.

    The paper drops one position a step; here ``interval`` at a time, between which the cache holds
    up to ``interval`` more. All heads of a layer keep the same positions, the newest among them.

    Attributes:
        budget: a number below 1 is a share of the prompt, from 1 on it is tokens; 2 at least.
    """

    name: ClassVar[str] = "tova"
    on_prefill: ClassVar[Literal["chunk", "end"] | None] = "end"
    budget: float = Field(gt=0, le=MOST)
    interval: int = Field(default=32, ge=1, le=MOST)

    @property
    def every(self) -> int | None:
        return self.interval

    @property
    def queries(self) -> int:
        return 1

    def keep(self, held: Held) -> Sequence[torch.Tensor] | None:
        """The positions with the largest mean weight over all heads."""
        kept = max(2, tokens(self.budget, held.prompt))
        if max(held.lengths) <= kept:
            return None
        scores = held.weights().mean(0)
        scores[-1] = torch.inf
        return best(scores[None], [kept]) * len(held.lengths)
