"""Ada-KV: SnapKV with a layer's positions shared out among its heads, https://arxiv.org/abs/2407.11550."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field

from quantkit.kv.policies.scores import best
from quantkit.kv.policies.snapkv import SnapKV


class AdaKV(SnapKV):
    """The positions with the best scores of all heads together stay: heads that look at few keep few.

    Attributes:
        floor: the share of its equal part that every head keeps at least.
    """

    name: ClassVar[str] = "adakv"
    floor: float = Field(default=0.2, ge=0, le=1)

    def choose(self, scores: torch.Tensor, counts: Sequence[int]) -> Sequence[torch.Tensor]:
        """Each head's best up to the floor, then the best of all."""
        scores = scores.clone()
        for head, safe in enumerate(best(scores, [max(1, int(count * self.floor)) for count in counts])):
            scores[head, safe] = torch.inf
        chosen = torch.zeros_like(scores, dtype=torch.bool).flatten()
        chosen[scores.flatten().topk(sum(counts)).indices] = True
        return [row.nonzero()[:, 0] for row in chosen.view_as(scores)]
