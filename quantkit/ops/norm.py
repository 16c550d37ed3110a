"""Root-mean-square normalization."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quantkit.ops import cpu_rows, gpu


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last dimension, https://arxiv.org/abs/1910.07467.

    Args:
        x: ``[..., n]``, any floating dtype.
        weight: ``[n]``, x's dtype, or float32.
        eps: added to the mean square.

    Returns:
        ``[..., n]`` in x's dtype. Statistics are float32; the normalized value is rounded to x's
        dtype before a weight of that dtype multiplies it, and after one of float32 did, as transformers does
        in Llama and in Gemma: so half-precision results agree. On a CPU a row's bits don't depend on the
        others, unless gradients are asked for.
    """
    if cpu_rows.takes(x):
        if weight.dtype != x.dtype:
            return cpu_rows.normalized(x, weight, eps).to(x.dtype)
        return cpu_rows.normalized(x, torch.ones_like(weight), eps).to(x.dtype) * weight
    if weight.dtype != x.dtype:
        return F.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)
    kernel = (x.is_cuda or gpu.SIMULATE) and not (torch.is_grad_enabled() and x.requires_grad)
    if kernel and gpu.norm_declines(x.device.type, x.dtype, x.shape[-1]) is None:
        from quantkit_kernels.triton.rms_norm import rms_norm as fused

        return fused(x, weight, eps)[0]
    # without a weight torch works in float32 and rounds once; with one it would round after multiplying
    return F.rms_norm(x, (x.shape[-1],), None, eps) * weight
