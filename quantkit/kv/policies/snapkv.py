"""SnapKV: at the end of the prompt keep what its last queries look at, https://arxiv.org/abs/2404.14469."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field

from quantkit.kv.base import MOST, Held, KVPolicy


class SnapKV(KVPolicy):
    """Each key head keeps the positions with the largest attention from the prompt's last queries.

    Attributes:
        budget: a number below 1 is the share of the prompt that stays, from 1 on the tokens that stay.
        window: so many last positions always stay; their queries are the ones that are asked.
        kernel: scores are averaged over so many neighbours, so that whole phrases stay.
    """

    name: ClassVar[str] = "snapkv"
    on_prefill: ClassVar[Literal["chunk", "end"] | None] = "end"
    budget: float = Field(gt=0, le=MOST)
    window: int = Field(default=32, ge=1, le=MOST)
    kernel: int = Field(default=5, ge=1, le=255)

    @property
    def queries(self) -> int:
        return self.window

    def keep(self, held: Held) -> torch.Tensor | None:
        """The best-scored earlier positions and the window."""
        total = held.lengths[0]
        kept = max(1, int(total * self.budget)) if self.budget < 1 else int(self.budget)
        recent = min(self.window, kept)
        earlier = total - recent
        if kept >= total:
            return None
        # averaged over the queries and over the query heads that share this key head
        scores = held.weights()[..., :earlier].mean((1, 2))
        pad = self.kernel // 2
        scores = F.avg_pool1d(scores[:, None], self.kernel, 1, pad, count_include_pad=True)[:, 0, :earlier]
        best = scores.topk(kept - recent, dim=-1).indices.sort(-1).values
        last = torch.arange(earlier, total, device=best.device).expand(best.shape[0], -1)
        return torch.cat((best, last), -1)
