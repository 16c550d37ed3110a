"""Attention sinks and a sliding window: StreamingLLM, https://arxiv.org/abs/2309.17453.

Keys stay rotated by their original positions. And a window that a model itself has in some of its layers.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field

from quantkit.kv.base import MAX_TOKENS, KVPolicy, PolicyView
from quantkit.kv.page_pool import PAGE

SUMMED = 256
"""Slots that attention on a CPU sums up before it adds them to others."""


class WindowPolicy(KVPolicy):
    """A query sees the first ``sinks`` positions and the last ``budget``, its own included.

    Memory of what won't be seen again is given back after every chunk of a prompt and every 64 decode steps
    (where 64 tokens are encoded together, that of whole pages); what a query sees doesn't depend on that.
    """

    name: ClassVar[str] = "window"
    on_prefill: ClassVar[Literal["chunk", "end"] | None] = "chunk"
    budget: int = Field(ge=1, le=MAX_TOKENS)
    sinks: int = Field(default=4, ge=0, le=MAX_TOKENS)

    @property
    def every(self) -> int | None:
        return PAGE

    @property
    def slack(self) -> int:
        return self.sinks + PAGE

    @property
    def visible(self) -> tuple[int, int] | None:
        return self.budget, self.sinks

    def keep(self, held: PolicyView) -> torch.Tensor | None:
        """What the next query will see."""
        if held.lengths[0] < self.budget + self.sinks:
            return None
        positions = held.positions()
        stays = (positions[0] < self.sinks) | (positions[0] > held.seen - self.budget)
        return stays.nonzero()[:, 0].expand(positions.shape[0], -1)


class ModelWindow(WindowPolicy):
    """The window that the model itself has in a layer; not for a recipe.

    What is given back are 256 positions at a time: attention sums by as many, so that not a bit of a result
    depends on when that was.

    Attributes:
        first: so many first positions stay where they are, whatever is given back.
    """

    release_granularity: ClassVar[int] = SUMMED
    sinks: int = Field(default=0, ge=0, le=0)
    first: int = Field(default=0, ge=0, le=MAX_TOKENS)

    @property
    def slack(self) -> int:
        return self.first + PAGE + SUMMED - 1

    def keep(self, held: PolicyView) -> torch.Tensor | None:
        """What the next query will see, and as much before it as makes the rest whole."""
        gone = max(0, held.seen - self.budget + 1 - self.first) // SUMMED * SUMMED
        positions = held.positions()
        stays = (positions[0] < self.first) | (positions[0] >= self.first + gone)
        return None if stays.all() else stays.nonzero()[:, 0].expand(positions.shape[0], -1)
