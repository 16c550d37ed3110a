"""Rows of different lengths as one rectangle."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quantkit.models.interfaces import KVCacheProtocol


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
