"""Dense little-endian bit streams in int32 words: how integer codes of 2 to 8 bits lie on disk.

Element ``i`` of a row takes bits ``[i * bits, (i + 1) * bits)`` of the row's stream, low bits first;
a row is padded with zero bits to whole words. Eight codes are exactly ``bits`` bytes, so both
directions go through one int64 for eight codes at a time, but for whole and half bytes. Hosts are
little-endian, as torch's are.
"""

from __future__ import annotations

import torch

_LANES = 8
_AT_ONCE = 1 << 26
"""Codes packed at a time: it takes three times their bytes."""
_SPREAD = 1 << 20
"""Pairs of codes of 4 bits spread at a time: they are in memory once more."""


def words(count: int, bits: int) -> int:
    """How many int32 words hold ``count`` codes of ``bits`` bits."""
    return -(-count * bits // 32)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack along the last dimension.

    Args:
        codes: uint8 ``[rows, count]``, each below ``2 ** bits``.
        bits: 2 to 8.

    Returns:
        int32 ``[rows, ceil(count * bits / 32)]``.
    """
    rows = max(1, _AT_ONCE // max(1, codes.shape[1]))
    return torch.cat([_pack(part, bits) for part in codes.split(rows)])


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    rows, count = codes.shape
    width = words(count, bits)
    if bits in (4, 8):
        octets = _pad(codes, width * 32 // bits)
        octets = octets[:, ::2] | octets[:, 1::2] << 4 if bits == 4 else octets.clone()
        return octets.reshape(-1).view(torch.int32).reshape(rows, width)
    lanes = _pad(codes, -(-count // _LANES) * _LANES).reshape(rows, -1, _LANES)
    stream = torch.zeros(lanes.shape[:2], dtype=torch.int64, device=codes.device)
    for lane in range(_LANES):
        stream |= lanes[:, :, lane].to(torch.int64) << (lane * bits)
    octets = stream.unsqueeze(-1).view(torch.uint8)[:, :, :bits].reshape(rows, -1)
    # flat before the view: a single row keeps a stride that another element size can't have
    return _pad(octets, width * 4)[:, : width * 4].reshape(-1).view(torch.int32).reshape(rows, width)


def unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The inverse of :func:`pack`.

    Args:
        packed: int32 ``[rows, words(count, bits)]``.
        bits: 2 to 8.
        count: codes a row.

    Returns:
        uint8 ``[rows, count]``.
    """
    rows = packed.shape[0]
    octets = packed.reshape(-1).view(torch.uint8).reshape(rows, packed.shape[1] * 4)
    if bits == 8:
        return octets[:, :count].clone()
    if bits == 4:
        pairs = octets.to(torch.int16)  # two codes each, which become two bytes
        for part in pairs.split(max(1, _SPREAD // max(1, pairs.shape[1]))):
            part |= part << 4
            part &= 0x0F0F
        return pairs.view(torch.uint8)[:, :count].contiguous()
    blocks = -(-count // _LANES)
    octets = _pad(octets, blocks * bits)[:, : blocks * bits].reshape(rows, blocks, bits)
    stream = torch.zeros(rows, blocks, _LANES, dtype=torch.uint8, device=packed.device)
    stream[:, :, :bits] = octets
    wide = stream.view(torch.int64)
    for part in wide.view(-1).split(_SPREAD // 16):
        _spread_(part, bits)
    return wide.view(torch.uint8).reshape(rows, -1)[:, :count].contiguous()


def _spread_(wide: torch.Tensor, bits: int) -> None:
    """Move the eight codes that begin each int64, lowest first, to its eight bytes: halves of four codes
    apart, then quarters, then single codes."""
    for size in (4, 2, 1):
        mask = sum((2 ** (size * bits) - 1) << at for at in range(0, 64, 16 * size))
        upper = (wide >> (size * bits)).bitwise_and_(mask)
        wide.bitwise_and_(mask).bitwise_or_(upper.bitwise_left_shift_(8 * size))


def take(packed: torch.Tensor, bits: int, index: torch.Tensor) -> torch.Tensor:
    """Some codes of every row, without unpacking the others.

    Args:
        packed: int32 ``[rows, words(count, bits)]``.
        bits: 2 to 8.
        index: int64 ``[n]``, which of the ``count``.

    Returns:
        uint8 ``[rows, n]``.
    """
    first = index * bits // 32
    second = (first + 1).clamp(max=packed.shape[1] - 1)  # a code may lie across two words
    low, high = (packed[:, at].to(torch.int64) & 0xFFFFFFFF for at in (first, second))
    return ((low | high << 32) >> index * bits % 32 & (2**bits - 1)).to(torch.uint8)


def _pad(rows: torch.Tensor, width: int) -> torch.Tensor:
    """Zeros on the right, up to ``width``; wider rows are left alone."""
    missing = width - rows.shape[1]
    return torch.nn.functional.pad(rows, (0, missing)) if missing > 0 else rows
