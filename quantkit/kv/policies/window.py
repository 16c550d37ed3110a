"""Attention sinks and a sliding window: StreamingLLM, https://arxiv.org/abs/2309.17453.

Keys stay rotated by their original positions. The file also has the window that a model itself has in some of
its layers, and the policy that keeps everything.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field

from quantkit.kv.base import MAX_TOKENS, PAGE, KVPolicy, PolicyView


class KeepAll(KVPolicy):
    """Nothing is ever dropped."""

    name: ClassVar[str] = "all"
    keeps_all: ClassVar[bool] = True


SPLIT = 256
"""Slots that attention on a CPU sums up before it adds them to others."""


class WindowPolicy(KVPolicy):
    """A query sees the first ``sinks`` positions and the last ``budget``, its own included.

    Memory of positions that won't be seen again is given back after every chunk of a prompt and every 64
    decode steps (pages at a time where 64 tokens are encoded together). What a query sees doesn't depend on
    that.
    """

    name: ClassVar[str] = "window"
    on_prefill: ClassVar[Literal["chunk", "end"] | None] = "chunk"
    budget: int = Field(ge=1, le=MAX_TOKENS)
    sinks: int = Field(default=4, ge=0, le=MAX_TOKENS)

    @property
    def decode_interval(self) -> int | None:
        return PAGE

    @property
    def slack(self) -> int:
        return self.sinks + PAGE

    @property
    def visible(self) -> tuple[int, int] | None:
        return self.budget, self.sinks

    def keep(self, view: PolicyView) -> torch.Tensor | None:
        """What the next query will see."""
        if view.lengths[0] < self.budget + self.sinks:
            return None
        positions = view.positions()
        stays = (positions[0] < self.sinks) | (positions[0] > view.seen - self.budget)
        return stays.nonzero()[:, 0].expand(positions.shape[0], -1)


class ModelWindow(WindowPolicy):
    """The window that the model itself has in a layer; not an option of a recipe.

    256 positions are given back at a time: attention sums up that many together, so no bit of a result
    depends on when they were given back.

    Attributes:
        first: the first ``first`` positions stay where they are.
    """

    release_granularity: ClassVar[int] = SPLIT
    sinks: int = Field(default=0, ge=0, le=0)
    first: int = Field(default=0, ge=0, le=MAX_TOKENS)

    @property
    def slack(self) -> int:
        return self.first + PAGE + SPLIT - 1

    def keep(self, view: PolicyView) -> torch.Tensor | None:
        """What the next query will see, and before it the rest of a split."""
        dropped = max(0, view.seen - self.budget + 1 - self.first) // SPLIT * SPLIT
        positions = view.positions()
        stays = (positions[0] < self.first) | (positions[0] >= self.first + dropped)
        return None if stays.all() else stays.nonzero()[:, 0].expand(positions.shape[0], -1)
