"""Policies that drop positions while they decode, too: H2O and TOVA."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from quantkit.kv.base import PAGE, PolicyView, Tracked
from quantkit.kv.policies.score_policy import DecodingPolicy, newest


class H2O(DecodingPolicy):
    """Keep the newest positions and those that received the most attention, https://arxiv.org/abs/2306.14048.
    Each KV head keeps positions of its own.

    Attributes:
        recent: the share of the budget that the newest positions get.
    """

    name: ClassVar[str] = "h2o"
    tracks: ClassVar[Tracked | None] = "attention_sum"
    recent: float = Field(default=0.5, ge=0, le=1)

    @property
    def query_window(self) -> int:
        return PAGE

    def score(self, view: PolicyView) -> torch.Tensor:
        """The attention that slots received so far; the newest slots stay in any case."""
        received = view.attention_received()
        count = max(1, int(self.layer_budget(view) * self.recent))
        return received.masked_fill(newest(view, count, received.device), torch.inf)


class Tova(DecodingPolicy):
    """Drop what the newest query attends to least, https://arxiv.org/abs/2401.06104. All heads of a layer
    keep the same positions, at least two, the newest among them."""

    name: ClassVar[str] = "tova"

    @property
    def query_window(self) -> int:
        return 1

    def layer_budget(self, view: PolicyView) -> int:
        return max(2, super().layer_budget(view))

    def score(self, view: PolicyView) -> torch.Tensor:
        """The newest query's attention, averaged over all heads; the newest slot stays in any case."""
        weights = view.window_attention()
        scores = weights.mean(0)
        scores[-1] = torch.inf
        return scores.expand_as(weights)
