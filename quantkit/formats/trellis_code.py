"""The code of the ``trellis`` format: what a run of symbols means.

64 rows of a column form a ring. A weight is not its own symbol of ``bits`` bits but the last ``window``
bits of the ring up to and with it: ``state = (…, symbol before, own symbol)``. This is trellis-coded
quantization, and rings are the tail-biting trellises of QTIP, https://arxiv.org/abs/2406.11235. Here a ring
lies along the column, where the weights' errors don't depend on each other.

What a state means depends on the window. One of 8 bits is looked up in a table of whole numbers that was
learned for Gaussian weights (:func:`quantkit.ops.viterbi.learned_levels`), as those of a rotated row nearly
are: its error is about that of a computed code of 12 bits. A state of 10 to 16 bits is computed, as QTIP
does: the product of the state with two odd numbers is a hash of 16 bits, whose four nibbles are added.
"""

from __future__ import annotations

import functools

import torch

RING = 64
"""Rows that share a ring."""
LANES = 16
"""The ring's places ``4 l … 4 l + 3`` are rows ``l, l + 16, l + 32, l + 48``: a step is a vector of rows.
With a learned table, the ring's places are its rows from the last to the first instead."""
LEARNED = 8
"""The window of the learned tables."""
COMPUTED = 12
"""The window of computed levels that recipes have, where they are decoded faster."""
LOW, HIGH = 0x9E35, 0x6A4D
"""The hash is the low half of ``state · LOW``, exclusive-or the high half of ``state · HIGH``."""
MIDDLE = 30
"""Of the sums, which are 0 to 60."""
DEVIATION = 9.2195444572928873
"""Of a sum of four uniform nibbles: ``sqrt(4 · (16² − 1) / 12)``."""
LEVELS = {
    2: ("f92235c40fde44d964dda40827cc0050c50ceb2ce4327e0a1eab56ec0ebb35edc8fa3909f9f0c61a1cf632"
        "dc08a5e7c4d827ae12e52a154937d2e70cf206cb3c3210e2f22cfee2093e0ee1b6f71346dba17fd40d5bf0"
        "e42f0726dfbfbcf01896eb510124c3d7ff27f34b051bd018f5151c4be50490f20ff2160aef35c92b06e9"),
    3: ("fc1e2dbc0cd942e954ebaefa15d30624c510ee34dd225dff1b9c35e407cd37f7def03ceffe09cc1a15071f"
        "e5fbb2d8c5db42d00bf10f223043fff106e914da273706e3f91e14f3073626d1b8f7084deba26cc01c4dfe"
        "ea380927e2d4c8fa15ad0f42f61fd3c5e42cf947070cd81aea2b1728f9ff81e807102f12f70dd92000e9"),
    4: ("f4192acc09da38e94de4b8ff20d71025c50be812d817630621a73adfffcf2df6eaee41e1fd02d40c13061d"
        "f2f8bddcced73ecffddf1d23322cf5ea06f010e4384504eef21608fc103424d3c2f7fe53e6a56cc90452ef"
        "ea411a13ddd3bff809b5034afc18d1c7e427f6350f0bd91fec211e2ff50981f20e042601fa15e517feed")}
"""By bits, the levels of the states 0 to 127 as int8, −127 to 127; those of the states 128 to 255 are the
same, negated."""
DEVIATIONS = {2: 45.8, 3: 38.47, 4: 36.11}
"""By bits, how many levels are a standard deviation of the source."""


@functools.cache
def learned(bits: int) -> tuple[int, ...]:
    """The levels of all 256 states of a window of 8 bits, −127 to 127."""
    half = [byte - 256 if byte > 127 else byte for byte in bytes.fromhex(LEVELS[bits])]
    return tuple(half + [-level for level in half])


@functools.cache
def table(bits: int, window: int) -> torch.Tensor:
    """float32 ``[2 ** window]``: the whole number that every state means. Not to be written."""
    if window == LEARNED:
        return torch.tensor(learned(bits), dtype=torch.float32)
    state = torch.arange(2**window, dtype=torch.int64)
    mixed = (state * LOW & 0xFFFF) ^ (state * HIGH >> 16)
    sums = sum((mixed >> shift & 15 for shift in (0, 4, 8, 12)), torch.zeros_like(state))
    return (sums - MIDDLE).to(torch.float32)


def deviation(bits: int, window: int) -> float:
    """What a standard deviation of Gaussian weights is in the levels of :func:`table`."""
    return DEVIATIONS[bits] if window == LEARNED else DEVIATION


@functools.cache
def _places(window: int) -> torch.Tensor:
    if window == LEARNED:
        return torch.arange(RING).flip(0)
    lane, step = torch.arange(LANES).unsqueeze(1), torch.arange(RING // LANES)
    return (LANES * step + lane).flatten()


def rings(matrix: torch.Tensor, window: int) -> torch.Tensor:
    """``[out, in]`` → ``[out / 64, in, 64]``: its rings, a place after the other."""
    rows, cols = matrix.shape
    tiles = matrix.reshape(rows // RING, RING, cols)
    return tiles[:, _places(window).to(matrix.device)].transpose(1, 2)


def unring(parts: torch.Tensor, window: int) -> torch.Tensor:
    """The inverse of :func:`rings`: ``[out / 64, in, 64]`` → ``[out, in]``."""
    tiles, cols, _ = parts.shape
    rows = torch.empty(tiles, RING, cols, dtype=parts.dtype, device=parts.device)
    rows[:, _places(window).to(parts.device)] = parts.transpose(1, 2)
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
    values = table(bits, window).to(symbols.device)
    return unring(values[states(rings(symbols, window), bits, window)], window)
