"""SnapKV: at the end of the prompt, keep what its last queries attend to,
https://arxiv.org/abs/2404.14469."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field

from quantkit.kv.base import MAX_TOKENS, PolicyView
from quantkit.kv.policies.score_policy import ScorePolicy, newest


class SnapKV(ScorePolicy):
    """Each KV head keeps the positions that receive the most attention from the prompt's last queries.

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
