"""Rows of an embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quantkit.ops.cpu_linear import Packed, isa


def embed(ids: torch.Tensor, table: torch.Tensor | Packed, size: int) -> torch.Tensor:
    """int64 ``[...]`` → ``[..., size]`` in the table's dtype.

    Args:
        ids: rows.
        table: ``[vocab, size]``; packed, it is a bfloat16 head that is the embedding too.
        size: of a row.
    """
    if isinstance(table, torch.Tensor):
        return F.embedding(ids, table)
    lanes = isa().lanes
    blocks = table.weights.view(torch.bfloat16).view(-1, table.columns // 2, lanes, 2)
    return blocks[ids // lanes, :, ids % lanes].flatten(-2)[..., :size]
