"""At a prompt's end, keep what its last queries attend to: SnapKV, and two ways to share its budget."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field

from quantkit.kv.base import MAX_TOKENS, PolicyView
from quantkit.kv.policies.score_policy import ScorePolicy, SharedBudget, newest


class SnapKV(ScorePolicy):
    """SnapKV, https://arxiv.org/abs/2404.14469.

    Each KV head keeps the positions that receive the most attention from the prompt's last queries.

    Attributes:
        window: the last ``window`` positions always stay; their queries are the ones that score (the
            observation window).
        kernel: scores are averaged over this many neighbors, so that whole phrases stay.
    """

    name: ClassVar[str] = "snapkv"
    window: int = Field(default=32, ge=1, le=MAX_TOKENS)
    kernel: int = Field(default=5, ge=1, le=255)

    @property
    def query_window(self) -> int:
        return self.window

    def score(self, view: PolicyView) -> torch.Tensor:
        """Attention from the observation window, averaged over neighbors (zeros beyond both ends)."""
        weights = view.window_attention()
        window = newest(view, min(self.window, self.layer_budget(view), *view.lengths), weights.device)
        earlier = weights.masked_fill(window, 0.0)[:, None]
        pooled = F.avg_pool1d(earlier, self.kernel, 1, self.kernel // 2, count_include_pad=True)
        return pooled[:, 0, :weights.shape[1]].masked_fill(window, torch.inf)


class AdaKV(SharedBudget, SnapKV):
    """Ada-KV, https://arxiv.org/abs/2407.11550: SnapKV's scores; the positions with the best scores of all
    heads together stay."""

    name: ClassVar[str] = "adakv"


class PyramidKV(SnapKV):
    """PyramidKV, https://arxiv.org/abs/2406.02069: low layers keep more positions than high ones.

    The budget is the mean over layers; from the first layer to the last it falls by equal steps.

    Attributes:
        beta: the last layer keeps the mean divided by ``beta``, unless the first layer would then keep more
            than there is.
    """

    name: ClassVar[str] = "pyramidkv"
    uniform_budget: ClassVar[bool] = False
    beta: float = Field(default=20, ge=1, le=1000)

    def layer_budget(self, view: PolicyView) -> int:
        """The budget of a layer. All are equal where the pyramid's top would be narrower than the window."""
        mean = super().layer_budget(view)
        if view.layers == 1:
            return mean
        smallest = mean / self.beta
        largest = min(2 * mean - smallest, view.prompt - self.window)
        smallest = 2 * mean - largest
        if not view.prompt >= largest >= smallest >= self.window:
            return mean
        return round(largest - (largest - smallest) * view.layer / (view.layers - 1))
