"""KVzip: keep what the prompt needs to be written once more, https://arxiv.org/abs/2505.23416."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from quantkit.kv.base import MAX_TOKENS, PAGE, PolicyView, Tracked
from quantkit.kv.policies.score_policy import SharedBudget


class KVzip(SharedBudget):
    """At its end the prompt is fed again; the positions that receive the most attention from any query stay.

    What stays doesn't depend on what is asked at the end, at the price of a second prompt. A layer's
    positions are shared among its heads.

    Attributes:
        chunk: tokens that are fed again behind the whole prompt at once.
        sinks: the first ``sinks`` positions always stay.
    """

    name: ClassVar[str] = "kvzip"
    tracks: ClassVar[Tracked | None] = "attention_max"
    chunk: int = Field(default=2048, ge=64, le=MAX_TOKENS)
    sinks: int = Field(default=4, ge=0, le=MAX_TOKENS)

    @property
    def query_window(self) -> int:
        return PAGE

    @property
    def reread_prompt(self) -> int | None:
        return self.chunk

    def score(self, view: PolicyView) -> torch.Tensor:
        """The largest attention that any query gave a slot; sinks stay in any case."""
        sinks = min(self.sinks, self.layer_budget(view), *view.lengths)
        return view.attention_received().masked_fill(view.positions() < sinks, torch.inf)
