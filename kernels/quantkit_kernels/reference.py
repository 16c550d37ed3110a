"""What the kernels compute, in torch: the tests' other side, in float64."""

from __future__ import annotations

import math

import torch


def dequantize_int(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | int = 0) -> torch.Tensor:
    """``(codes − zero) · scale`` in float64.

    Args:
        codes: integers ``[n, k]``.
        scale: ``[n, k / group]``.
        zero: a tensor of the same shape, or one number for all.
    """
    group = codes.shape[1] // scale.shape[1]
    if isinstance(zero, torch.Tensor):
        zero = zero.double().repeat_interleave(group, 1)
    return (codes.double() - zero) * scale.double().repeat_interleave(group, 1)


def dequantize_nf4(codes: torch.Tensor, absmax: torch.Tensor, levels: tuple[float, ...]) -> torch.Tensor:
    """``levels[codes] · absmax`` in float64: codes ``[n, k]``, absmax of blocks of the flattened weight."""
    block = codes.numel() // absmax.numel()
    table = torch.tensor(levels, dtype=torch.float64, device=codes.device)
    return table[codes.long()] * absmax.double().repeat_interleave(block).view(codes.shape)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """float64, without the roundings that models have on the way."""
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x [N, H, D]`` by ``cos, sin [N, D]``, in the wider of their dtypes."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos[:, None] + turned * sin[:, None]


def encode_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 ``[..., D]`` → int8 codes and bfloat16 scales ``[...]``: rounded up, never denormal."""
    kind = torch.finfo(torch.bfloat16)
    scale = x.abs().amax(-1) / 127
    near = scale.to(torch.bfloat16)
    above = (near.view(torch.int16) + 1).view(torch.bfloat16)
    scale = torch.where(near.float() < scale, above, near).clamp(kind.tiny, kind.max)
    return (x * (1 / scale.float())[..., None]).round().clamp(-127, 127).to(torch.int8), scale


def encode_grid(x: torch.Tensor, bits: int, at: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float32 → codes, bfloat16 scales and lows of every 32 numbers along a dimension, low rounded down.

    Args:
        x: its dimension ``at`` (negative) is a multiple of 32.
        bits: the bits of a code.
        at: the dimension along which numbers share a grid.

    Returns:
        uint8 in x's shape; ``codes · scale + low`` of what ``unflatten(at, (−1, 32))`` gives, shaped without
        the 32.
    """
    groups = x.unflatten(at, (-1, 32))
    least, highest = groups.amin(at), groups.amax(at)
    low = least.to(torch.bfloat16)
    below = torch.nextafter(low, torch.full_like(low, -math.inf))
    low = torch.where(low.float() > least, below, low)
    scale = ((highest - low.float()) / (2**bits - 1) * (1 + 2.0**-8)).to(torch.bfloat16)
    steps = (groups - low.float().unsqueeze(at)) / scale.float().unsqueeze(at)
    codes = steps.round().clamp(0, 2**bits - 1).to(torch.uint8)
    return codes.flatten(at - 1, at), scale, low


def rotation(n: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A rotation of width n = a · m, a a power of two: signs float32 ``[n]``, the Hartley transform float32
    ``[m, m]``, and ``diag(signs) · (Hartley ⊗ Hadamard)``, float64 ``[n, n]``."""
    span = n & -n
    signs = torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(n)).double() * 2 - 1
    place = torch.arange(n // span, dtype=torch.float64)
    angle = torch.outer(place, place) % (n // span) * (2 * math.pi * span / n)
    mix = (angle.cos() + angle.sin()) / math.sqrt(n // span)
    dense, pair = mix, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / math.sqrt(2)
    while len(dense) < n:
        dense = torch.kron(dense, pair)
    signs, mix, dense = (t.to(device) for t in (signs, mix, signs[:, None] * dense))
    return signs.float(), mix.float(), dense


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """One query of each head: ``q [G, D]``, ``k, v [S, D]``, ``seen [S]`` → ``[G, D]`` in q's dtype."""
    if not bool(seen.any()):
        return torch.zeros_like(q)
    scores = (q @ k.T / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf)
    return scores.softmax(-1) @ v
