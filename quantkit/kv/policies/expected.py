"""Expected Attention: keep what queries to come will look at, by their distribution,
https://arxiv.org/abs/2510.00636.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field

from quantkit.kv.base import MAX_TOKENS, PAGE, KVPolicy, PolicyView
from quantkit.kv.policies.scores import best, places, tokens
from quantkit.kv.query_window import SINKS


class ExpectedAttention(KVPolicy):
    """Queries are taken for Gaussian, as the prompt was: ``E exp(q·k) = exp(μ·k + kᵀΣk / 2)``.

    No query of the prompt's end is special, so that what stays doesn't depend on what is asked last.

    Attributes:
        budget: a number below 1 is the share of the prompt that stays, from 1 on the tokens that stay.
        steps: how many queries to come, over whose positions rotations are averaged.
        sinks: so many first positions always stay.
    """

    name: ClassVar[str] = "expected"
    on_prefill: ClassVar[Literal["chunk", "end"] | None] = "end"
    tracks: ClassVar[Literal["sums", "peaks", "moments"] | None] = "moments"
    budget: float = Field(gt=0, le=MAX_TOKENS)
    steps: int = Field(default=512, ge=1, le=MAX_TOKENS)
    sinks: int = Field(default=4, ge=0, le=MAX_TOKENS)

    @property
    def queries(self) -> int:
        return PAGE

    def keep(self, held: PolicyView) -> Sequence[torch.Tensor] | None:
        """The best by expected attention times the size of what it reads."""
        counts = [min(tokens(self.budget, held.prompt), length) for length in held.lengths]
        if counts == list(held.lengths) or held.seen <= max(SINKS, self.sinks):
            return None
        mean, covariance = held.future(self.steps)
        keys, values = held.keys().float(), held.values().float()
        heads = keys.shape[0]
        at, lengths = places(held, keys.device)
        first = held.positions() < self.sinks
        scores = torch.zeros(keys.shape[:2], device=keys.device)
        groups = (part.unflatten(0, (heads, -1)).unbind(1) for part in (mean, covariance))
        for m, c in zip(*groups):
            logits = (keys @ m[:, :, None])[..., 0] + ((keys @ c) * keys).sum(-1) / 2
            scores += logits.masked_fill(first | (at >= lengths), -torch.inf).softmax(-1)
        scores = (scores * values.norm(dim=-1)).masked_fill(first, torch.inf)
        return best(scores.masked_fill(at >= lengths, -torch.inf), counts)
