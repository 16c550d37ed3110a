"""The memory order of packed weights: the order of the registers that a tensor core reads (a *fragment*).

A tile is 128 rows by ``k`` columns. Its 32-bit words are ordered so that a thread which loads 16 consecutive
bytes has, after masking and shifting, exactly the numbers that the matrix instruction expects from it:
row ``g`` and ``g + 8`` of 16, columns ``2t, 2t + 1`` of 8, for lane ``4g + t``. So weights go from memory to
registers to the tensor core without being exchanged between threads.
https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-fragment-mma-16816-float

The order only matters for speed: :func:`tile` undoes it by reshaping, on any hardware.

A word has two numbers for each bit field, one in each 16-bit half: masking both at once makes a pair of
half-precision numbers in one instruction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn.functional import pad

ROWS = 128
"""Rows of a tile. Packed weights are padded to whole tiles."""
VECTOR = 128
"""Bits that a thread loads at once."""
MAGIC = {torch.bfloat16: 0x43004300, torch.float16: 0x64006400, torch.float32: 0}
"""128 (bfloat16) or 1024 (float16) in both halves of a word: with a small integer q in the lowest bits they
are 128 + q and 1024 + q. Kernels take it as a runtime argument, because ptxas fuses ``and`` with ``or`` only
if one of the two constants is in a register."""


def columns(bits: int, k: int) -> int:
    """Return how many columns one load of the whole tile covers, if the tile is ``k`` wide.

    For int4 it is 64, or 32 in a tile that is no wider (a load then covers twice the rows); for int8, 32.
    """
    return min(VECTOR // bits * 2, k)


def shuffle(codes: torch.Tensor, bits: int, k: int, wide: int, adjacent: bool = False) -> torch.Tensor:
    """Pack codes into words, in fragment order.

    Args:
        codes: uint8 ``[n, k_all]``, ``n`` a multiple of 128 and ``k_all`` of ``k``.
        bits: 1, 2, 4 or 8.
        k: columns of a tile: 32, or a multiple of 64 (int4), or of 32 (int8); 128 of fewer bits.
        wide: adjacent columns that a lane reads: see :func:`lane_columns`.
        adjacent: the two numbers of a word that make one register are in neighboring nibbles instead of the
            two halves.

    Returns:
        int32 ``[n / 128, k_all / k, 128 * k * bits / 32]``.
    """
    n, total = codes.shape
    span = columns(bits, k)
    both = 4 // (span // 16) if bits == 4 else 1  # 64-row blocks that one vector covers
    inner = (2, 4, 2) if wide == 2 else (4, 2, 2)
    parts = codes.reshape(n // ROWS, 2 // both, both, 4, 2, 8, total // k, k // span, span // 16, *inner)
    c, t = (9, 10) if wide == 2 else (10, 9)
    # the order is: tile, its column, load, block, warp, g, t, block in the vector, 16 columns, c, e, h
    parts = parts.permute(0, 6, 7, 1, 3, 5, t, 2, 8, c, 11, 4)
    shape: tuple[int, ...]
    if bits == 8:
        shape, shifts = (-1, 1, 2, 2), [[[16 * e + 8 * h for h in (0, 1)] for e in (0, 1)]]
    else:
        shape, shifts = (-1, 2, 2, 2), [[[4 * e + 8 * c + 16 * h if adjacent else 16 * e + 4 * c + 8 * h
                                          for h in (0, 1)] for e in (0, 1)] for c in (0, 1)]
    shift = torch.tensor(shifts, dtype=torch.int64, device=codes.device)
    if bits < 4:  # where a nibble would be are numbers of two or four times 16 columns, halves first
        within = torch.tensor([0, 2, 1, 3][:4 // bits], device=codes.device)
        shape, shift = (-1, 4 // bits, *shape[1:]), within.view(-1, 1, 1, 1) + shift
    # tile by tile: eight bytes per code would take too much memory for a whole large layer
    words = torch.empty(n // ROWS, total // k, ROWS * k * bits // 32, dtype=torch.int32, device=codes.device)
    for row, part in zip(words, parts):
        fields = part.reshape(shape).to(torch.int64) << shift
        row.copy_(fields.flatten(1).sum(1).to(torch.int32).view(row.shape))
    return words


def arrange(numbers: torch.Tensor, k: int) -> torch.Tensor:
    """Reorder numbers that go to the tensor core undecoded, in the order of its registers.

    Args:
        numbers: ``[n, k_all]`` of 1, 2 or 4 bytes, ``n`` a multiple of 128 and ``k_all`` of ``k``. A register
            holds ``e`` of them: four of 1 byte, two of 2 bytes, and two of 4 bytes (which only the
            interpreter multiplies).
        k: columns of a tile, a multiple of ``8 e``.

    Returns:
        The same numbers, ``[n / 128, k_all / k, 128 * k]``.
    """
    n, total = numbers.shape
    e = side_by_side(numbers.dtype)
    # dimensions: block of 64 rows, warp, h, g; tile, step of the instruction, c, t, e
    parts = numbers.reshape(n // ROWS, 2, 4, 2, 8, total // k, k // (8 * e), 2, 4, e)
    return parts.permute(0, 5, 6, 1, 2, 4, 8, 7, 3, 9).reshape(n // ROWS, total // k, ROWS * k).contiguous()


def side_by_side(dtype: torch.dtype) -> int:
    """Return how many numbers of a row one register holds."""
    return 4 if dtype.itemsize == 1 else 2


def rows(t: torch.Tensor, gated: bool = False) -> torch.Tensor:
    """Pad ``[n, ...]`` with zeros to whole tiles.

    With ``gated`` the first half of the rows are a gate projection's and the second half an up projection's.
    They are interleaved, eight rows each, so that both sums of a feature are in one thread.

    Raises:
        ValueError: ``gated`` is set and n is odd.
    """
    if not gated:
        return _padded(t, -(-t.shape[0] // ROWS) * ROWS)
    half = t.shape[0] // 2
    if t.shape[0] % 2:
        raise ValueError(f"gate and up must have equally many rows, but {t.shape[0]} is odd")
    padded = -(-half // (ROWS // 2)) * (ROWS // 2)
    both = torch.stack([_padded(part, padded) for part in t.split(half)])
    return both.reshape(2, padded // 8, 8, *t.shape[1:]).transpose(0, 1).reshape(2 * padded, *t.shape[1:])


def whole_tiles(t: torch.Tensor, k: int, gated: bool = False) -> torch.Tensor:
    """Pad ``[n, k_all]`` by :func:`rows`, and columns to a multiple of ``k``; not copied if it fits
    already."""
    t = rows(t, gated)
    return t if t.shape[1] % k == 0 else pad(t, (0, -t.shape[1] % k))


def _padded(t: torch.Tensor, n: int) -> torch.Tensor:
    return t if t.shape[0] == n else torch.cat((t, t.new_zeros(n - t.shape[0], *t.shape[1:])))


def family_of(device: torch.device) -> str:
    """Return ``ampere`` (and Ada), ``hopper``, ``blackwell`` or ``cdna``: layouts and launches depend on it.

    A CPU, where Triton's interpreter runs kernels, counts as ``hopper``.
    """
    if device.type != "cuda":
        return "hopper"
    if torch.version.hip is not None:
        return "cdna"
    major = torch.cuda.get_device_capability(device)[0]
    # 12 are consumer GPUs, with as little shared memory as Ada
    return "hopper" if major == 9 else "blackwell" if major in (10, 11) else "ampere"


def lane_columns(family: str) -> int:
    """Return how many adjacent columns a lane reads: 4 on Ampere, where Triton assigns them so; else 2."""
    return 4 if family == "ampere" else 2


@triton.jit
def tile(v: tl.tensor, K: tl.constexpr, SPAN: tl.constexpr, BOTH: tl.constexpr,
         WIDE: tl.constexpr) -> tl.tensor:
    """Reorder numbers in the packed order, ``[words, c?, e, h]``, to ``[128, K]``."""
    v = v.reshape(K // SPAN, 2 // BOTH, 4, 8, 4, BOTH, SPAN // 16, 2, 2, 2)
    v = v.trans(1, 5, 2, 9, 3, 0, 6, 7, 4, 8) if WIDE == 2 else v.trans(1, 5, 2, 9, 3, 0, 6, 4, 7, 8)
    return v.reshape(128, K)


@triton.jit
def plain_tile(v: tl.tensor, K: tl.constexpr, E: tl.constexpr) -> tl.tensor:
    """Reorder numbers as :func:`arrange` stores them, E per register, to ``[128, K]``."""
    v = v.reshape(K // (8 * E), 2, 4, 8, 4, 2, 2, E)
    return v.trans(1, 2, 6, 3, 0, 5, 4, 7).reshape(128, K)


@triton.jit
def plain_place(row: tl.tensor, col: tl.tensor, E: tl.constexpr) -> tl.tensor:
    """Return the index at which :func:`arrange` stores a number of a tile."""
    lane = (((col // (8 * E) * 2 + row // 64) * 4 + row // 16 % 4) * 8 + row % 8) * 4 + col // E % 4
    return (lane * 4 + col // (4 * E) % 2 * 2 + row // 8 % 2) * E + col % E


@triton.jit
def place(row: tl.tensor, col: tl.tensor, SPAN: tl.constexpr, BOTH: tl.constexpr,
          WIDE: tl.constexpr) -> tl.tensor:
    """Return where :func:`shuffle` stores a number of a tile.

    The result is the index of a lane's share of 16 columns by 16 rows (one word of 4-bit numbers, two of
    8-bit numbers), and c, e and h.
    """
    inner = col % 16
    t = inner // 2 % 4 if WIDE == 2 else inner // 4
    c = inner // 8 if WIDE == 2 else inner // 2 % 2
    block = row // 64
    lane = (((col // SPAN * (2 // BOTH) + block // BOTH) * 4 + row // 16 % 4) * 8 + row % 8) * 4 + t
    return (lane * BOTH + block % BOTH) * (SPAN // 16) + col % SPAN // 16, c, col % 2, row // 8 % 2


@triton.jit
def by_word(rows: tl.tensor, K: tl.constexpr, SPAN: tl.constexpr, BOTH: tl.constexpr) -> tl.tensor:
    """Broadcast one number per row, ``[128]``, to the words: those of a word's two rows (h = 0, 1), as two
    ``[words]``."""
    r = rows.reshape(2 // BOTH, BOTH, 4, 2, 8).trans(0, 2, 4, 1, 3)
    r = r.reshape(1, 2 // BOTH, 4, 8, 1, BOTH, 1, 2)
    r = tl.broadcast_to(r, (K // SPAN, 2 // BOTH, 4, 8, 4, BOTH, SPAN // 16, 2))
    return tl.split(r.reshape(16 * K, 2))


@triton.jit
def halves(t: tl.tensor, D: tl.constexpr) -> tl.tensor:
    """Split an int32 word into the two 16-bit floats that it contains."""
    return (t & 0xFFFF).to(tl.int16).to(D, bitcast=True), (t >> 16).to(tl.int16).to(D, bitcast=True)


@triton.jit
def pairs(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, D: tl.constexpr) -> tl.tensor:
    """Join the four registers of a 4-bit word, (c, h) = 00, 10, 01, 11, to numbers ``[words, c, e, h]``."""
    a0, a1 = halves(a, D)
    b0, b1 = halves(b, D)
    c0, c1 = halves(c, D)
    d0, d1 = halves(d, D)
    return tl.join(tl.join(tl.join(a0, b0), tl.join(a1, b1)), tl.join(tl.join(c0, d0), tl.join(c1, d1)))


@triton.jit
def nibbles(w: tl.tensor, ADJACENT: tl.constexpr) -> tl.tensor:
    """Return the eight numbers of a 4-bit word as int32 ``[words, c, e, h]``, like :func:`pairs`."""
    E: tl.constexpr = 4 if ADJACENT else 16
    C: tl.constexpr = 8 if ADJACENT else 4
    H: tl.constexpr = 16 if ADJACENT else 8
    low = tl.join(tl.join(w & 15, (w >> C) & 15), tl.join((w >> E) & 15, (w >> (E + C)) & 15))
    high = tl.join(tl.join((w >> H) & 15, (w >> (C + H)) & 15),
                   tl.join((w >> (E + H)) & 15, (w >> (E + C + H)) & 15))
    return tl.join(low, high)


@triton.jit
def int8_pair(t: tl.tensor, magic: tl.tensor, D: tl.constexpr) -> tl.tensor:
    """Convert the two's complement bytes 0 and 2 of a word to two numbers, exactly.

    In bfloat16 ``0x4300 | (q & 127)`` is 128 plus the low seven bits, and ``0x4300 | (q & 128)`` is 128 or
    256; their difference is q. In float16 ``(q & 255) ^ 0x6480`` is 1024 + 128 + q. For ``magic`` see
    :data:`MAGIC`.
    """
    if D.is_fp32():
        low, high = ((t << 24) >> 24).to(D), ((t << 8) >> 24).to(D)
    elif D.is_fp16():
        low, high = halves((t & 0x00FF00FF) ^ (magic | 0x00800080), D)
        low, high = low - 1152.0, high - 1152.0
    else:
        a, b = halves((t & 0x007F007F) | magic, D)
        c, d = halves((t & 0x00800080) | magic, D)
        low, high = a - c, b - d
    return low, high
