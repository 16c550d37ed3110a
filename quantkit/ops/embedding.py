"""Rows of an embedding."""

from __future__ import annotations

import torch

from quantkit.ops.linear_weight import LinearWeight


def embed(ids: torch.Tensor, table: LinearWeight, dtype: torch.dtype) -> torch.Tensor:
    """int64 ``[...]`` → ``[..., size]`` in ``dtype``: of a quantized table ``[vocab, size]`` only these rows
    are decoded.

    Raises:
        IndexError: an id isn't in the table.
    """
    flat = ids.reshape(-1)
    if not len(flat):
        return torch.empty(*ids.shape, table.shape[1], dtype=dtype, device=ids.device)
    # a GPU isn't waited for
    if ids.device.type == "cpu" and not 0 <= int(flat.min()) <= int(flat.max()) < table.shape[0]:
        raise IndexError(f"a token id isn't in 0 … {table.shape[0] - 1}")
    return table.rows(flat).to(dtype).reshape(*ids.shape, table.shape[1])
