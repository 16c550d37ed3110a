"""Policies that rank positions: a score for each slot, the best slots stay."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field

from quantkit.kv.base import MAX_TOKENS, KVPolicy, PolicyView
from quantkit.kv.checked import checked_budget, checked_scores, checked_slots


class ScorePolicy(KVPolicy):
    """At the end of the prompt, the slots with the highest scores stay. A subclass implements :meth:`score`.

    Attributes:
        budget: below 1 the share of the prompt that stays, from 1 on the number of tokens that stay.
    """

    on_prefill: ClassVar[Literal["chunk", "end"] | None] = "end"
    budget: float = Field(gt=0, le=MAX_TOKENS)

    @abstractmethod
    def score(self, view: PolicyView) -> torch.Tensor:
        """float32 ``[Hkv, S]``: the higher, the rather a slot stays; ∞: it stays in any case."""

    def layer_budget(self, view: PolicyView) -> int:
        """How many slots stay in each head of this layer."""
        return max(1, int(view.prompt * self.budget)) if self.budget < 1 else int(self.budget)

    def select(self, scores: torch.Tensor, counts: Sequence[int]) -> Sequence[torch.Tensor]:
        """The slots that stay, of each head in rising order.

        Args:
            scores: float32 ``[Hkv, S]``; −∞ beyond a head's length.
            counts: the number of slots that stay in each head.
        """
        return top_slots(scores, counts)

    def keep(self, view: PolicyView) -> Sequence[torch.Tensor] | None:
        budget = checked_budget(self, self.layer_budget(view))
        counts = [min(budget, length) for length in view.lengths]
        if counts == list(view.lengths):
            return None
        scores = checked_scores(self, self.score(view), view.lengths)
        return checked_slots(self, self.select(scores, counts), view.lengths)


class SharedBudget(ScorePolicy):
    """Heads of a layer share their budget: those with few high scores keep few slots (Ada-KV,
    https://arxiv.org/abs/2407.11550).

    Attributes:
        floor: every head keeps at least this share of an equal part.
    """

    uniform_budget: ClassVar[bool] = False
    floor: float = Field(default=0.2, ge=0, le=1)

    def select(self, scores: torch.Tensor, counts: Sequence[int]) -> Sequence[torch.Tensor]:
        return top_slots_of_all_heads(scores, counts, self.floor)


def stored(view: PolicyView, device: torch.device) -> torch.Tensor:
    """bool ``[Hkv, S]``: which slots are within their head's length."""
    lengths = torch.tensor(view.lengths, device=device)[:, None]
    return torch.arange(max(view.lengths), device=device) < lengths


def newest(view: PolicyView, count: int, device: torch.device) -> torch.Tensor:
    """bool ``[Hkv, S]``: the last ``count`` slots of each head, and what lies beyond them."""
    lengths = torch.tensor(view.lengths, device=device)[:, None]
    return torch.arange(max(view.lengths), device=device) >= lengths - count


def top_slots(scores: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    """The ``count`` slots of each head with the highest scores ``[Hkv, S]``, in rising order."""
    return [row.topk(count).indices.sort().values for row, count in zip(scores, counts, strict=True)]


def top_slots_of_all_heads(scores: torch.Tensor, counts: Sequence[int], floor: float) -> list[torch.Tensor]:
    """As many slots as :func:`top_slots` in all, with the highest scores of all heads together.

    Args:
        scores, counts: as for :func:`top_slots`.
        floor: each head keeps at least this share of its count: its own best slots.
    """
    scores = scores.clone()
    for head, safe in enumerate(top_slots(scores, [max(1, int(count * floor)) for count in counts])):
        scores[head, safe] = torch.inf
    chosen = torch.zeros_like(scores, dtype=torch.bool).flatten()
    chosen[scores.flatten().topk(sum(counts)).indices] = True
    return [row.nonzero()[:, 0] for row in chosen.view_as(scores)]


class DecodingPolicy(ScorePolicy):
    """``budget`` positions stay after the prompt and after every ``interval``-th decode step.

    The papers drop one position a step. Here ``interval`` positions are dropped at a time; between two times
    the cache holds up to ``interval`` more.

    Attributes:
        interval: decode steps between two times.
    """

    interval: int = Field(default=32, ge=1, le=MAX_TOKENS)

    @property
    def decode_interval(self) -> int | None:
        return self.interval
