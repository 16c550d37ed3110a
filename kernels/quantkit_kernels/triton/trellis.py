"""Weights of 2 to 4 bits in a trellis with a table of 256 levels: ``y = x Wᵀ``, ``w = table[state] · scale``.

A state is 8 bits: a row's own symbol, above it the next row's, and so on, in rings of 64 rows. This is
trellis-coded quantization, https://arxiv.org/abs/2406.11235, with a learned table. Levels are whole numbers
that bfloat16 and float16 hold exactly; a scale a row multiplies the finished sum.

Symbols are read once from memory. Those of the rows after come from the same words, loaded once more: the
halves of a tile, 64 rows each, lie in turn by eight rows, as a gate and what it opens do. So the two rows of
a word belong to two rings, and the next word of 64 holds the rows after both.

Of 3 bits the lower two and the highest lie apart. In a state of such symbols first come the lower bits of
three rows, then the highest of two: the table is in this order.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from quantkit_kernels.triton.fragment import (
    family_of,
    lane_columns,
    pairs,
    rows,
    shuffle,
    tile,
    whole_tiles,
)
from quantkit_kernels.triton.packed import TritonDecoder, TritonWeight

BK = 128
"""Columns of a tile."""
RING = 64
"""Rows of a ring."""
STATES = 256
LAYOUT = "rings"
SHARED = ("hopper", "blackwell")
"""GPUs with shared memory for as many copies of the table as a warp has threads: 32 KiB a program."""
SEVERAL = 4
"""Tiles of a row from which on the table is copied: of one tile no later ones are loaded ahead, and a launch
with little more shared memory than the table asks the driver for none."""
COPY = tl.constexpr("""{
        .shared .align 128 .b8 table[32768];
        .reg .pred more;
        .reg .b16 half;
        .reg .b32 state, threads, lane, both, base, row, at;
        .reg .b64 from;
        mov.u32 state, %tid.x;
        mov.u32 threads, %ntid.x;
        mov.u32 lane, %laneid;
        mov.u32 base, table;
    fill:
        mad.wide.u32 from, state, 2, $1;
        ld.global.nc.b16 half, [from];
        mov.b32 both, {half, half};
        mad.lo.u32 row, state, 128, base;""" + "".join(f"""
        add.u32 at, lane, {chunk};
        and.b32 at, at, 7;
        mad.lo.u32 at, at, 16, row;
        st.shared.v4.b32 [at], {{both, both, both, both}};""" for chunk in range(8)) + """
        add.u32 state, state, threads;
        setp.lt.u32 more, state, 256;
        @more bra fill;
        bar.sync 0;
        mad.lo.u32 $0, lane, 4, base;
    }""")
"""Every thread of a warp gets a table of its own, in a bank of its own: a row of 128 bytes a state."""
LOOK_UP = tl.constexpr("""{
        .reg .b32 a, b, c, d;
        dp4a.u32.u32 a, $2, 0x00000080, $3;
        dp4a.u32.u32 b, $2, 0x00008000, $3;
        dp4a.u32.u32 c, $2, 0x00800000, $3;
        dp4a.u32.u32 d, $2, 0x80000000, $3;
        ld.shared.b32 a, [a];
        ld.shared.b32 b, [b];
        ld.shared.b32 c, [c];
        ld.shared.b32 d, [d];
        prmt.b32 $0, a, c, 0x5410;
        prmt.b32 $1, b, d, 0x5410;
    }""")
"""A word's four states → pairs of levels: of bytes 0 and 2, and of 1 and 3. ``dp4a`` multiplies one byte by
128 and adds where the thread's table begins."""


@triton.jit
def _words(plane_ptr: tl.tensor, later: tl.constexpr, SIZE: tl.constexpr, LANE: tl.constexpr) -> tl.tensor:
    """SIZE words of a plane, LANE of them a lane's: those of the rows that come ``later`` in their rings."""
    at = tl.arange(0, SIZE)
    if later:
        at = at // (256 * LANE) * (256 * LANE) + (at + later * 4 * LANE) % (256 * LANE)
    # a thread loads a lane's words, even if it could load more at once: so planes' words come together
    return tl.load(plane_ptr + tl.max_contiguous(tl.multiple_of(at, LANE), LANE))


@triton.jit
def _even(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Words of 2-bit numbers → words of nibbles, made of both words' numbers of even places."""
    return (low & 0x33333333) | ((high & 0x33333333) << 2)


@triton.jit
def _odd(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """The same of odd places."""
    return ((low >> 2) & 0x33333333) | (high & -0x33333334)


@triton.jit
def _level(table_ptr: tl.tensor, state: tl.tensor, D: tl.constexpr) -> tl.tensor:
    """The level of the state in the lowest byte."""
    at = state & 255
    if D.is_fp32():
        level = (tl.load(table_ptr + at).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        level = tl.load(table_ptr + (at + 256 if D.is_fp16() else at)).to(D, bitcast=True)
    return level


@triton.jit
def _levels(table: tl.tensor, low: tl.tensor, high: tl.tensor, D: tl.constexpr,
            SHARED: tl.constexpr) -> tl.tensor:
    """Words of states' lower and upper nibbles → levels, D ``[words, c, e, h]``."""
    a = (low & 0x0F0F0F0F) | ((high & 0x0F0F0F0F) << 4)
    b = ((low >> 4) & 0x0F0F0F0F) | (high & -0x0F0F0F10)
    if SHARED:
        a0, a1 = tl.inline_asm_elementwise(LOOK_UP, "=r,=r,r,r", [a, table], (tl.int32, tl.int32),
                                           is_pure=True, pack=1)
        b0, b1 = tl.inline_asm_elementwise(LOOK_UP, "=r,=r,r,r", [b, table], (tl.int32, tl.int32),
                                           is_pure=True, pack=1)
        levels = pairs(a0, b0, a1, b1, D)
    else:
        first = tl.join(tl.join(_level(table, a, D), _level(table, b, D)),
                        tl.join(_level(table, a >> 16, D), _level(table, b >> 16, D)))
        second = tl.join(tl.join(_level(table, a >> 8, D), _level(table, b >> 8, D)),
                         tl.join(_level(table, a >> 24, D), _level(table, b >> 24, D)))
        levels = tl.join(first, second)
    return levels


@triton.jit
def ready(table_ptr: tl.tensor, D: tl.constexpr, MODE: tl.constexpr) -> tl.tensor:
    """What :func:`decode_trellis` looks levels up in: the table itself, or where a thread's copy is."""
    if MODE == "4 shared" or MODE == "3 shared" or MODE == "2 shared":
        table = tl.inline_asm_elementwise(COPY, "=r,l", [table_ptr + 256 if D.is_fp16() else table_ptr],
                                          tl.int32, is_pure=False, pack=1)
    else:
        table = table_ptr
    return table


@triton.jit
def decode_trellis(w: tl.tensor, s: tl.tensor, magic: tl.tensor, D: tl.constexpr, K: tl.constexpr,
                   MODE: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """A pointer to a tile, and the table → nothing, and levels, D ``[128, K]``."""
    SHARED: tl.constexpr = MODE == "4 shared" or MODE == "3 shared" or MODE == "2 shared"
    if MODE == "4" or MODE == "4 shared":
        v = _levels(s, _words(w, 0, 2048, 4), _words(w, 1, 2048, 4), D, SHARED)
        a = tile(v, K, 64, 1, WIDE)
    else:
        first, second, third = _words(w, 0, 1024, 4), _words(w, 1, 1024, 4), _words(w, 2, 1024, 4)
        if MODE == "2" or MODE == "2 shared":
            last = _words(w, 3, 1024, 4)
        else:
            high, higher = _words(w + 1024, 0, 512, 2), _words(w + 1024, 1, 512, 2)
            last = tl.join((high & 0x55555555) | ((higher & 0x55555555) << 1),
                           ((high >> 1) & 0x55555555) | (higher & -0x55555556)).reshape(1024)
        v = tl.join(_levels(s, _even(first, second), _even(third, last), D, SHARED),
                    _levels(s, _odd(first, second), _odd(third, last), D, SHARED))
        # dimensions: block, warp, g, t, pair of 16 columns, c, e, h, one of the pair
        v = v.reshape(2, 4, 8, 4, 4, 2, 2, 2, 2)
        v = v.trans(0, 1, 7, 2, 4, 8, 5, 3, 6) if WIDE == 2 else v.trans(0, 1, 7, 2, 4, 8, 3, 5, 6)
        a = v.reshape(128, K)
    return s, a


@triton.jit
def number(tile_ptr: tl.tensor, s: tl.tensor, row: tl.tensor, col: tl.tensor, K: tl.constexpr,
           MODE: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Single levels of tiles, float32; ``s`` points to the table."""
    inner = col % 16
    t = inner // 2 % 4 if WIDE == 2 else inner // 4
    c = inner // 8 if WIDE == 2 else inner // 2 % 2
    shift = 4 * c + 16 * (col % 2) + 8 * (row // 64)
    state = row * 0
    if MODE == "4" or MODE == "4 shared":
        for later in tl.static_range(2):
            lane = (col // 64 * 64 + (row + later) % 64) * 4 + t
            word = tl.load(tile_ptr + lane * 4 + col % 64 // 16)
            state |= ((word >> shift) & 15) << (4 * later)
    else:
        shift += col // 16 % 2 * 2
        THREE: tl.constexpr = MODE == "3" or MODE == "3 shared"
        for later in tl.static_range(3 if THREE else 4):
            lane = (row + later) % 64 * 4 + t
            word = tl.load(tile_ptr + lane * 4 + col // 32)
            state |= ((word >> shift) & 3) << (2 * later)
            if THREE and later < 2:
                word = tl.load(tile_ptr + 1024 + lane * 2 + col // 64)
                state |= ((word >> (shift + col // 32 % 2)) & 1) << (6 + later)
    return _level(s, state, tl.float32)


TRELLIS = TritonDecoder(decode_trellis, number)


@functools.cache
def table(levels: tuple[int, ...], bits: int, device: torch.device) -> torch.Tensor:
    """The levels of 256 states as kernels look them up: int16 ``[2, 256]``, the bits of bfloat16, then of
    float16 numbers. Weights of a device share it."""
    state = torch.arange(STATES)
    if bits == 3:
        low, high = [state >> 2 * at & 3 for at in range(3)], [state >> 6 + at & 1 for at in range(2)]
        state = low[0] | high[0] << 2 | low[1] << 3 | high[1] << 5 | low[2] << 6
    numbers = torch.tensor(levels)[state]
    return torch.stack([numbers.to(dtype).view(torch.int16)
                        for dtype in (torch.bfloat16, torch.float16)]).to(device)


def pack(symbols: torch.Tensor, scale: torch.Tensor, levels: tuple[int, ...], bits: int,
         family: str | None = None, gated: bool = False, shared: bool | None = None) -> TritonWeight:
    """Repack once.

    Args:
        symbols: uint8 ``[n, k]``, of ``bits`` bits, n a multiple of 64.
        scale: the rows' scales, float ``[n]``.
        levels: of the 256 states, −127 to 127.
        bits: 2, 3 or 4.
        family: the GPUs' family; by default that of the tensors' device.
        gated: rows are a gate's, then as many of what it opens.
        shared: the table is copied to shared memory, a copy for every thread of a warp; by default where
            there is room, and rows are of :data:`SEVERAL` tiles. In the interpreter, and on AMD's GPUs, it
            can't be.

    Raises:
        ValueError: rows aren't whole rings.
    """
    n, k = symbols.shape
    if n % (RING << gated):
        raise ValueError(f"rows must be a multiple of {RING << gated}, not {n}")
    family = family or family_of(symbols.device)
    shared = symbols.is_cuda and family in SHARED and k >= SEVERAL * BK if shared is None else shared
    padded = whole_tiles(symbols, BK, gated)
    if not gated:
        padded = padded.unflatten(0, (-1, 2, RING // 8, 8)).transpose(1, 2).reshape(padded.shape)
    words = torch.cat([shuffle(padded >> first & 2**count - 1, count, BK, lane_columns(family))
                       for first, count in (((0, 2), (2, 1)) if bits == 3 else ((0, bits),))], dim=2)
    return TritonWeight(words, rows(scale.float(), gated), n, k, BK, 0, f"{bits}{' shared' * shared}",
                        family, TRELLIS, gated, LAYOUT, table=table(levels, bits, symbols.device))
