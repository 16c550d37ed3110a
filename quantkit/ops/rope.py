"""Rotary position embedding in its rotate-half form, https://arxiv.org/abs/2104.09864.

Dimension ``i`` is paired with ``i + D / 2`` (not with ``i + 1``), as Hugging Face's weights expect.
Frequencies are radians a position, float32 ``[D / 2]``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from quantkit.ops.rows import by_sequence


def frequencies(theta: float, dim: int) -> torch.Tensor:
    """``theta ** (-2 i / dim)`` for i in ``[0, dim / 2)``."""
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))


def linear_frequencies(theta: float, dim: int, factor: float) -> torch.Tensor:
    """All wavelengths stretched by ``factor``, https://arxiv.org/abs/2306.15595."""
    return frequencies(theta, dim) / factor


def llama3_frequencies(theta: float, dim: int, factor: float, low: float, high: float,
                       original: int) -> torch.Tensor:
    """Llama 3.1's, https://arxiv.org/abs/2407.21783: stretch long wavelengths, keep short ones.

    Args:
        theta: base of the wavelengths.
        dim: the head dimension.
        factor: by how much wavelengths above ``original / low`` are stretched.
        low, high: between ``original / high`` and ``original / low`` the two are blended.
        original: positions it was trained with.
    """
    plain = frequencies(theta, dim)
    turns = original * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * plain / factor + kept * plain


def yarn_frequencies(theta: float, dim: int, factor: float, fast: float, slow: float, original: int,
                     truncate: bool = True) -> torch.Tensor:
    """YaRN, https://arxiv.org/abs/2309.00071: a ramp over dimensions from kept to stretched.

    Args:
        theta: base of the wavelengths.
        dim: the head dimension.
        factor: by how much long wavelengths are stretched.
        fast, slow: the ramp runs between the dimensions that turn this often in ``original`` positions.
        original: positions it was trained with.
        truncate: the ramp's ends are rounded outwards to whole dimensions.
    """
    plain = frequencies(theta, dim)

    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(fast), dimension(slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    stretched = ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return plain / factor * stretched + plain * (1 - stretched)


def longrope_frequencies(theta: float, dim: int, factors: Sequence[float]) -> torch.Tensor:
    """LongRoPE's, https://arxiv.org/abs/2402.13753: every pair's wavelength times a factor of its own."""
    plain = theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * plain)


def tables(positions: torch.Tensor, inverse: torch.Tensor, scale: float,
           dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines for :func:`apply_rope`.

    Args:
        positions: int64 ``[B, T]``; what stands at padding (−1) has no effect on other positions.
        inverse: float32 ``[R / 2]``, or ``[B, 1, 1, R / 2]`` where sequences differ.
        scale: both are multiplied by it.
        dtype: the result's dtype; angles are always float32.

    Returns:
        ``cos`` and ``sin``, ``[B, 1, T, R]``; the first half of ``sin`` is negated.
    """
    angles = by_sequence(positions[:, None, :, None].float() * inverse)
    cos = torch.cat([angle.cos() for angle in angles]) * scale
    sin = torch.cat([angle.sin() for angle in angles]) * scale
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate every pair of dimensions by its position's angle.

    Args:
        x: ``[B, H, T, D]``.
        cos, sin: from :func:`tables`, x's dtype; narrower than D, they turn the first R dimensions only.

    Returns:
        ``[B, H, T, D]`` in x's dtype.
    """
    size = cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat((apply_rope(x[..., :size], cos, sin), x[..., size:]), -1)
    turned = torch.roll(x, size // 2, -1)
    if x.dtype in (torch.bfloat16, torch.float16):
        return torch.addcmul(x * cos, turned, sin)  # the product is exact in the float32 that it is added in
    return x * cos + turned * sin  # one IEEE operation each: the same bits wherever an element stands
