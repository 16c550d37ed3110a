"""Gated activations, and the cap on scores and logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quantkit.ops import cpu_rows


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, elementwise: SwiGLU, https://arxiv.org/abs/2002.05202.

    Args:
        gate: any shape and floating dtype.
        up: as ``gate``.

    Returns:
        A new tensor like ``gate``; neither argument is written. On a CPU a row's bits don't depend on the
        others, unless gradients are asked for.
    """
    if cpu_rows.takes(gate):
        return cpu_rows.gated("silu", gate, up).to(gate.dtype)
    return F.silu(gate).mul_(up)


def gelu_tanh_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``gelu(gate) * up`` with GELU's approximation by tanh, https://arxiv.org/abs/1606.08415: GeGLU.

    Arguments and result are as for :func:`silu_mul`.
    """
    if cpu_rows.takes(gate):
        return cpu_rows.gated("gelu", gate, up).to(gate.dtype)
    return F.gelu(gate, approximate="tanh").mul_(up)


CLAMPED_GAIN = 1.702
"""Of the sigmoid in :func:`clamped_silu_mul`: with it a gate's activation is close to GELU."""


def clamped_silu_mul(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """``g · sigmoid(1.702 g) · (u + 1)``, elementwise, with ``g = min(gate, limit)`` and ``u`` as ``up``, but
    within ``[-limit, limit]``: gpt-oss, https://arxiv.org/abs/2508.10925.

    Arguments and result are otherwise as for :func:`silu_mul`, by which it is computed, in float32. Its
    arguments are rounded once.
    """
    gain = gate.double().clamp(max=limit) * CLAMPED_GAIN
    other = (up.double().clamp(-limit, limit) + 1) / CLAMPED_GAIN
    return silu_mul(gain.float(), other.float()).to(gate.dtype)


def softcapped(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """``cap · tanh(x / cap)``, in x's dtype, https://arxiv.org/abs/2408.00118; x itself without a cap."""
    return x if cap is None else (x / cap).tanh() * cap
