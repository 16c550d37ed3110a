"""Ada-KV: SnapKV with a layer's positions shared out among its heads, https://arxiv.org/abs/2407.11550."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field

from quantkit.kv.policies.scores import best_of_all
from quantkit.kv.policies.snapkv import SnapKV


class AdaKV(SnapKV):
    """The positions with the best scores of all heads together stay: heads that look at few keep few.

    Attributes:
        floor: the share of its equal part that every head keeps at least.
    """

    name: ClassVar[str] = "adakv"
    uniform_budget: ClassVar[bool] = False
    floor: float = Field(default=0.2, ge=0, le=1)

    def choose(self, scores: torch.Tensor, counts: Sequence[int]) -> Sequence[torch.Tensor]:
        """The best of all heads."""
        return best_of_all(scores, counts, self.floor)
