"""TOVA: drop what the newest query attends to least, https://arxiv.org/abs/2401.06104."""

from __future__ import annotations

from typing import ClassVar

import torch

from quantkit.kv.base import PolicyView
from quantkit.kv.policies.decoding import DecodingPolicy


class Tova(DecodingPolicy):
    """All heads of a layer keep the same positions, at least two, the newest among them."""

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
