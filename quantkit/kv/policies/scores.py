"""From scores to slots: what policies that rank positions have in common."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from quantkit.kv.base import PolicyView


def tokens(budget: float, of: int) -> int:
    """A budget below 1 is a share, from 1 on it is a number of tokens."""
    return max(1, int(of * budget)) if budget < 1 else int(budget)


def places(held: PolicyView, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots ``[S]`` and each head's length ``[Hkv, 1]``, to be compared."""
    lengths = torch.tensor(held.lengths, device=device)[:, None]
    return torch.arange(max(held.lengths), device=device), lengths


def best(scores: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    """Of each head so many slots with the highest scores ``[Hkv, S]``, in rising order."""
    return [row.topk(count).indices.sort().values for row, count in zip(scores, counts, strict=True)]


def best_of_all(scores: torch.Tensor, counts: Sequence[int], floor: float) -> list[torch.Tensor]:
    """As many slots as :func:`best`, shared out among heads.

    Args:
        scores, counts: as for :func:`best`.
        floor: of each head this share of its count stays at least: its best. The others are the best of all.
    """
    scores = scores.clone()
    for head, safe in enumerate(best(scores, [max(1, int(count * floor)) for count in counts])):
        scores[head, safe] = torch.inf
    chosen = torch.zeros_like(scores, dtype=torch.bool).flatten()
    chosen[scores.flatten().topk(sum(counts)).indices] = True
    return [row.nonzero()[:, 0] for row in chosen.view_as(scores)]


def of_last_queries(held: PolicyView, window: int, kernel: int) -> torch.Tensor:
    """SnapKV's scores, float32 ``[Hkv, S]``: what the last queries look at, averaged over neighbours.

    Args:
        held: what a layer holds.
        window: so many last slots of a head score highest.
        kernel: how many neighbours; beyond the first and the last earlier slot are zeros.
    """
    weights = held.weights()
    at, lengths = places(held, weights.device)
    late = at >= lengths - window
    earlier = weights.masked_fill(late, 0.0)[:, None]
    pooled = F.avg_pool1d(earlier, kernel, 1, kernel // 2, count_include_pad=True)
    scores = pooled[:, 0, :weights.shape[1]].masked_fill(late, torch.inf)
    return scores.masked_fill(at >= lengths, -torch.inf)
