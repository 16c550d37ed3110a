"""Policies for which no query at the prompt's end is special: expected attention and KVzip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field

from quantkit.kv.base import MAX_TOKENS, PAGE, PolicyView, Tracked
from quantkit.kv.policies.score_policy import ScorePolicy, SharedBudget, stored
from quantkit.kv.sequence import SINKS


class ExpectedAttention(ScorePolicy):
    """Keep what queries to come are likely to attend to, https://arxiv.org/abs/2510.00636.

    Queries to come are assumed Gaussian with the prompt's moments: ``E exp(q·k) = exp(μ·k + kᵀΣk / 2)``.

    Attributes:
        steps: the number of queries to come over whose positions the rotations are averaged.
        sinks: the first ``sinks`` positions always stay.
    """

    name: ClassVar[str] = "expected"
    tracks: ClassVar[Tracked | None] = "query_moments"
    steps: int = Field(default=512, ge=1, le=MAX_TOKENS)
    sinks: int = Field(default=4, ge=0, le=MAX_TOKENS)

    @property
    def query_window(self) -> int:
        return PAGE

    def keep(self, view: PolicyView) -> Sequence[torch.Tensor] | None:
        # before that there are no moments
        return None if view.seen <= max(SINKS, self.sinks) else super().keep(view)

    def score(self, view: PolicyView) -> torch.Tensor:
        """Expected attention times the norm of the value that it reads; sinks stay in any case."""
        means, covariances = view.future_queries(self.steps)
        keys, values = view.keys().float(), view.values().float()
        kv_heads = keys.shape[0]
        sinks = view.positions() < self.sinks
        excluded = sinks | ~stored(view, keys.device)
        scores = torch.zeros(keys.shape[:2], device=keys.device)
        groups = (moment.unflatten(0, (kv_heads, -1)).unbind(1) for moment in (means, covariances))
        for mean, covariance in zip(*groups):
            logits = (keys @ mean[:, :, None])[..., 0] + ((keys @ covariance) * keys).sum(-1) / 2
            scores += logits.masked_fill(excluded, -torch.inf).softmax(-1)
        return (scores * values.norm(dim=-1)).masked_fill(sinks, torch.inf)


class KVzip(SharedBudget):
    """Keep what the prompt needs to be written once more, https://arxiv.org/abs/2505.23416.

    At its end the prompt is fed again; the positions that receive the most attention from any query stay.

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
