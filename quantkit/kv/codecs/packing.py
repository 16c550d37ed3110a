"""Codes of 2 to 4 bits in bytes, lowest first. Those of 3 bits are all low pairs, then all high bits."""

from __future__ import annotations

import torch


def packed_bytes(dim: int, bits: int) -> int:
    """Bytes that ``dim`` codes take; 8 divides ``dim``."""
    return dim * bits // 8


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 ``[..., D]`` → uint8 ``[..., D · bits / 8]``."""
    if bits == 3:
        return torch.cat((_pack(codes & 3, 2), _pack(codes >> 2, 1)), -1)
    return _pack(codes, bits)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of :func:`pack`."""
    if bits == 3:
        pairs = packed.shape[-1] // 3 * 2
        return _unpack(packed[..., :pairs], 2) | _unpack(packed[..., pairs:], 1) << 2
    return _unpack(packed, bits)


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    places = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (codes.unflatten(-1, (-1, 8 // bits)) << places).sum(-1, dtype=torch.uint8)


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    places = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return (packed[..., None] >> places & 2**bits - 1).flatten(-2)
