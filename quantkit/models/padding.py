"""Rows of different lengths as one rectangle."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quantkit.models.interfaces import KVCacheProtocol, LanguageModel


def padded_rows(tokens: Sequence[Sequence[int]], cache: KVCacheProtocol,
                device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pad rows at their ends.

    Args:
        tokens: ids of each row; none is empty.
        cache: says at which position each row goes on.
        device: where the model takes them.

    Returns:
        ids int64 ``[B, T]``, positions int64 ``[B, T]`` (−1: padding), and the index of each row's last
        token, int64 ``[B]``.
    """
    longest = max(map(len, tokens))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in tokens], device=device)
    lengths = torch.tensor([len(row) for row in tokens], device=device)
    inside = torch.arange(longest, device=device) < lengths[:, None]
    return ids, cache.next_positions(longest).masked_fill(~inside, -1), lengths - 1


def wanted_rows(model: LanguageModel, tokens: Sequence[Sequence[int]], batch: KVCacheProtocol,
                wanted: Sequence[int]) -> torch.Tensor:
    """:meth:`~quantkit.models.interfaces.LanguageModel.forward` of a model that takes rectangles."""
    ids, positions, last = padded_rows(tokens, batch, model.device)
    if max(wanted) < 2:
        return model(ids, positions, batch, last)[torch.tensor(wanted, device=model.device) > 0].float()
    logits = model(ids, positions, batch)
    return torch.cat([logits[row, len(ids) - count:len(ids)]
                      for row, (ids, count) in enumerate(zip(tokens, wanted))]).float()
