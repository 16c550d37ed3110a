"""The gated activation of Llama-like MLPs."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, elementwise: SwiGLU, https://arxiv.org/abs/2002.05202.

    Args:
        gate: any shape and floating dtype.
        up: as ``gate``.

    Returns:
        A new tensor like ``gate``; neither argument is written.
    """
    return F.silu(gate).mul_(up)
