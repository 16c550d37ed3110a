"""KVzip: keep what it takes to write the prompt once more, https://arxiv.org/abs/2505.23416."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field

from quantkit.kv.base import MAX_TOKENS, PAGE, KVPolicy, PolicyView
from quantkit.kv.policies.scores import best_of_all, places, tokens


class KVzip(KVPolicy):
    """At its end the prompt is fed again; the positions that any one query then looked at most stay.

    What stays doesn't depend on what is asked, at the price of a second prompt. A layer's positions are
    shared out among its heads.

    Attributes:
        budget: a number below 1 is the share of the prompt that stays, from 1 on the tokens that stay.
        piece: so many tokens are fed again at once, behind the whole prompt.
        sinks: so many first positions always stay.
        floor: the share of its equal part that every head keeps at least.
    """

    name: ClassVar[str] = "kvzip"
    uniform_budget: ClassVar[bool] = False
    on_prefill: ClassVar[Literal["chunk", "end"] | None] = "end"
    tracks: ClassVar[Literal["sums", "peaks", "moments"] | None] = "peaks"
    budget: float = Field(gt=0, le=MAX_TOKENS)
    piece: int = Field(default=2048, ge=64, le=MAX_TOKENS)
    sinks: int = Field(default=4, ge=0, le=MAX_TOKENS)
    floor: float = Field(default=0.2, ge=0, le=1)

    @property
    def queries(self) -> int:
        return PAGE

    @property
    def reread_prompt(self) -> int | None:
        return self.piece

    def keep(self, held: PolicyView) -> Sequence[torch.Tensor] | None:
        """The best of all heads together."""
        counts = [min(tokens(self.budget, held.prompt), length) for length in held.lengths]
        if counts == list(held.lengths):
            return None
        scores = held.sums()
        at, lengths = places(held, scores.device)
        scores = scores.masked_fill(held.positions() < min(self.sinks, *counts), torch.inf)
        return best_of_all(scores.masked_fill(at >= lengths, -torch.inf), counts, self.floor)
