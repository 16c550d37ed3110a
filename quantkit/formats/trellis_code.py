"""The code of the ``trellis`` format: what a run of symbols means.

64 rows of a column form a ring. A weight is not its own symbol of ``bits`` bits but the last ``window``
bits of the ring up to and with it: ``state = (…, symbol before, own symbol)``. A state's value is computed,
not looked up: the product of the state with two odd numbers is a hash, whose four nibbles are added. A sum of
four uniform numbers is nearly Gaussian, and so are the weights of a rotated row.

Trellis-coded quantization with computed codes is QTIP's, https://arxiv.org/abs/2406.11235, and rings are its
tail-biting trellises. Here the hash takes 16-bit arithmetic, and a ring lies along the column, where the
weights' errors don't depend on each other.
"""

from __future__ import annotations

import functools

import torch

RING = 64
"""Rows that share a ring."""
LANES = 16
"""The ring's places ``4 l … 4 l + 3`` are rows ``l, l + 16, l + 32, l + 48``: a step is a vector of rows."""
LOW, HIGH = 0x9E35, 0x6A4D
"""The hash is the low half of ``state · LOW``, exclusive-or the high half of ``state · HIGH``."""
MIDDLE = 30
"""Of the sums, which are 0 to 60."""
DEVIATION = 9.2195444572928873
"""Of a sum of four uniform nibbles: ``sqrt(4 · (16² − 1) / 12)``."""
WINDOWS = (10, 16)
"""The shortest and the longest window."""


@functools.cache
def table(window: int) -> torch.Tensor:
    """int64 ``[2 ** window]``: the value of every state, −30 to 30. Not to be written."""
    state = torch.arange(2**window, dtype=torch.int64)
    mixed = (state * LOW & 0xFFFF) ^ (state * HIGH >> 16)
    return sum((mixed >> shift & 15 for shift in (0, 4, 8, 12)), torch.zeros_like(state)) - MIDDLE


@functools.cache
def _places() -> torch.Tensor:
    lane, step = torch.arange(LANES).unsqueeze(1), torch.arange(RING // LANES)
    return (LANES * step + lane).flatten()


def rings(matrix: torch.Tensor) -> torch.Tensor:
    """``[out, in]`` → ``[out / 64, in, 64]``: its rings, a place after the other."""
    rows, cols = matrix.shape
    tiles = matrix.reshape(rows // RING, RING, cols)
    return tiles[:, _places().to(matrix.device)].transpose(1, 2)


def unring(parts: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`rings`: ``[out / 64, in, 64]`` → ``[out, in]``."""
    tiles, cols, _ = parts.shape
    rows = torch.empty(tiles, RING, cols, dtype=parts.dtype, device=parts.device)
    rows[:, _places().to(parts.device)] = parts.transpose(1, 2)
    return rows.reshape(tiles * RING, cols)


def states(symbols: torch.Tensor, bits: int, window: int) -> torch.Tensor:
    """The state at every place.

    Args:
        symbols: uint8 ``[…, 64]``, a ring along the last dimension.
        bits: the bits of a symbol.
        window: bits of a state.

    Returns:
        int64, the shape of ``symbols``.
    """
    wide = symbols.to(torch.int64)
    codes = wide.clone()
    for back in range(1, -(-window // bits)):
        codes |= wide.roll(back, dims=-1) << back * bits
    return codes & 2**window - 1


def decode(symbols: torch.Tensor, bits: int, window: int) -> torch.Tensor:
    """What symbols uint8 ``[out, in]`` mean, before their rows' scales: float32 ``[out, in]``."""
    values = table(window).to(device=symbols.device, dtype=torch.float32)
    return unring(values[states(rings(symbols), bits, window)])
