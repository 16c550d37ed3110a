"""Which tokens go to which experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def route(scores: torch.Tensor, chosen: int, normalized: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely experts of each token, https://arxiv.org/abs/2101.03961.

    Args:
        scores: ``[n, experts]`` of the router, any floating dtype.
        chosen: experts a token; of equals the first.
        normalized: their weights are made to sum to 1.

    Returns:
        int64 ``[n, chosen]`` and their weights, float32 ``[n, chosen]``: shares of a softmax over all.
    """
    shares = scores.float().softmax(-1)
    best, order = shares.sort(dim=-1, descending=True, stable=True)
    best = best[:, :chosen]
    if normalized:
        best = best / best.sum(-1, keepdim=True)
    return order[:, :chosen], best


def by_expert(chosen: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """For each expert that a token chose, in rising order: its number, the tokens that chose it in rising
    order, and as which of their choices, both int64.

    Args:
        chosen: int64 ``[n, k]``, no number twice in a row.
    """
    flat = chosen.reshape(-1)
    order = flat.argsort(stable=True)
    numbers, counts = flat[order].unique_consecutive(return_counts=True)
    for number, places in zip(numbers.tolist(), order.split(counts.tolist())):
        yield number, places // chosen.shape[1], places % chosen.shape[1]
