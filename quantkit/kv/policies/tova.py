"""TOVA: drop what the newest query looks at least, https://arxiv.org/abs/2401.06104."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from quantkit.kv.base import PolicyView
from quantkit.kv.policies.again import DecodingPolicy
from quantkit.kv.policies.scores import best, tokens


class Tova(DecodingPolicy):
    """All heads of a layer keep the same positions, two at least, the newest among them."""

    name: ClassVar[str] = "tova"

    @property
    def queries(self) -> int:
        return 1

    def keep(self, held: PolicyView) -> Sequence[torch.Tensor] | None:
        """The positions with the largest mean weight over all heads."""
        kept = max(2, tokens(self.budget, held.prompt))
        if max(held.lengths) <= kept:
            return None
        scores = held.weights().mean(0)
        scores[-1] = torch.inf
        return best(scores[None], [kept]) * len(held.lengths)
