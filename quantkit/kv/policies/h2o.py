"""H2O: keep the newest positions and those that received the most attention,
https://arxiv.org/abs/2306.14048."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from quantkit.kv.base import PAGE, PolicyView, Tracked
from quantkit.kv.policies.decoding import DecodingPolicy
from quantkit.kv.policies.score_policy import newest


class H2O(DecodingPolicy):
    """Each KV head keeps positions of its own.

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
