"""4-bit floats by 4-bit floats, both in groups, by the instruction of Blackwell's that applies scales itself.

Tensor cores of compute capability 10 multiply e2m1 codes in groups of 32 with powers of 2 (MXFP4) or of 16
with e4m3 scales (NVFP4), 64 columns at a time, and read codes, scales and sums without decoding anything:
https://docs.nvidia.com/cuda/parallel-thread-execution/#tcgen05-mma-scale-factor. 128 rows of the weight are
the first operand; x is the second and has at least 16 rows there.

Such weights are multiplied so for one row too, where memory decides and decoding would cost no time: the two
orders would have to lie in memory side by side. The bytes read are the same in both.

A tile is 128 rows by :data:`BK` columns: all its codes, two a byte, row by row, then all its scales, row by
row. A row of x is laid out likewise, its codes and then its scales, so that neither needs a second address.

Triton's interpreter has no such instruction; there codes and scales of the same tiles are decoded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quantkit_kernels.triton.dependent import fetch, let_next_begin, wait
from quantkit_kernels.triton.epilogue import finish, finish_segments
from quantkit_kernels.triton.fragment import ROWS, rows, whole_tiles
from quantkit_kernels.triton.packed import TritonDecoder, TritonWeight
from quantkit_kernels.triton.token_groups import GroupRounding

BK = 256
"""Columns of a tile: 128 bytes of codes."""
GROUPS = (16, 32)


@triton.jit
def _level(code: tl.tensor) -> tl.tensor:
    """Codes, int32 → float32."""
    return (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True) * 2.0**126


@triton.jit
def _scale(byte: tl.tensor, MODE: tl.constexpr) -> tl.tensor:
    """Bytes of scales, int32 → float32."""
    if MODE == "e4m3":
        scale = tl.where(byte == 0x7F, float("nan"), (byte << 20).to(tl.float32, bitcast=True) * 2.0**120)
    else:
        scale = tl.maximum(byte << 23, 1 << 22).to(tl.float32, bitcast=True)
        scale = tl.where(byte == 0xFF, float("nan"), scale)
    return scale


@triton.jit
def decode_block(codes: tl.tensor, scales: tl.tensor, MODE: tl.constexpr) -> tl.tensor:
    """Bytes ``[rows, K / 2]`` and ``[rows, K / group]`` → float32 ``[rows, K]``."""
    R: tl.constexpr = codes.shape[0]
    K: tl.constexpr = codes.shape[1] * 2
    G: tl.constexpr = K // scales.shape[1]
    byte = codes.to(tl.int32)
    v = tl.join(_level(byte), _level(byte >> 4)).reshape(R, K // G, G)
    return (v * _scale(scales.to(tl.int32), MODE)[:, :, None]).reshape(R, K)


@triton.jit
def block_number(tile_ptr: tl.tensor, s: tl.tensor, row: tl.tensor, col: tl.tensor, K: tl.constexpr,
                 MODE: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Single numbers of tiles, float32."""
    G: tl.constexpr = 16 if MODE == "e4m3" else 32
    byte = tl.load(tile_ptr + row * (K // 2) + col // 2).to(tl.int32)
    scale = tl.load(tile_ptr + 64 * K + row * (K // G) + col // G).to(tl.int32)
    v = _level(byte >> (col % 2 * 4)) * _scale(scale, MODE)
    if s is not None:
        v *= s
    return v


@triton.jit(do_not_specialize=["m"])
def block_scaled_kernel(x_ptr: tl.tensor, t_ptr: tl.tensor, w_ptr: tl.tensor, s_ptr: tl.tensor,
                        b_ptr: tl.tensor, r_ptr: tl.tensor, y_ptr: tl.tensor, m: tl.tensor, n: tl.tensor,
                        x_row: tl.tensor, r_row: tl.tensor, y_row: tl.tensor, magic: tl.tensor,
                        part_ptr: tl.tensor, count_ptr: tl.tensor, BM: tl.constexpr, BK: tl.constexpr,
                        WORDS: tl.constexpr, TILES: tl.constexpr, PER: tl.constexpr, SPLIT: tl.constexpr,
                        NPAD: tl.constexpr, MODE: tl.constexpr, GATED: tl.constexpr, STAGES: tl.constexpr,
                        PDL: tl.constexpr, INSTRUCTION: tl.constexpr) -> None:
    """128 rows of the weight by BM rows of x.

    x uint8, rows x_row apart: TILES · BK codes, then scales; w uint8 ``[NPAD / 128, TILES, WORDS]``; s
    float32 ``[NPAD]``, or ``None``; the rest: see :func:`~quantkit_kernels.triton.matmul.matmul_kernel`.
    INSTRUCTION: not in the interpreter.
    """
    G: tl.constexpr = 16 if MODE == "e4m3" else 32
    rn = tl.arange(0, 128)
    rm = tl.program_id(1) * BM + tl.arange(0, BM)
    rk = tl.arange(0, BK // 2)
    rg = tl.arange(0, BK // G)
    seen = rm < m
    first = tl.program_id(2) * PER if SPLIT else 0
    last = tl.minimum(first + PER, TILES) if SPLIT else TILES
    x_here = x_ptr + rm.to(tl.int64) * x_row
    w_here = w_ptr + tl.program_id(0).to(tl.int64) * (TILES * WORDS)
    if PDL:
        let_next_begin()
        fetch(w_here + first * WORDS, (last - first) * WORDS)
        wait()
    total = tl.zeros([128, BM], tl.float32)
    for begin in tl.range(first, last, PER):
        acc = tl.zeros([128, BM], tl.float32)
        for i in tl.range(begin, tl.minimum(begin + PER, TILES), num_stages=STAGES):
            w = tl.load(w_here + i * WORDS + rn[:, None] * (BK // 2) + rk[None, :])
            ws = tl.load(w_here + i * WORDS + 64 * BK + rn[:, None] * (BK // G) + rg[None, :])
            x = tl.load(x_here[None, :] + i * (BK // 2) + rk[:, None], mask=seen[None, :], other=0)
            xs = tl.load(x_here[:, None] + TILES * BK // 2 + i * (BK // G) + rg[None, :],
                         mask=seen[:, None], other=0)
            if INSTRUCTION:
                if MODE == "e4m3":
                    ws = ws.to(tl.float8e4nv, bitcast=True)
                    xs = xs.to(tl.float8e4nv, bitcast=True)
                acc = tl.dot_scaled(w, ws, "e2m1", x, xs, "e2m1", acc)
            else:
                acc = tl.dot(decode_block(w, ws, MODE), decode_block(x.trans(), xs, MODE).trans(), acc,
                             input_precision="ieee")
        total += acc
    begin = tl.program_id(0) * 128
    if SPLIT:
        finish_segments(total, part_ptr, count_ptr, begin, rn, t_ptr, s_ptr, b_ptr, r_ptr, y_ptr, m, n, r_row,
                        y_row, NPAD, (TILES + PER - 1) // PER, GATED, False)
    else:
        finish(total, begin, rn, rm, t_ptr, s_ptr, b_ptr, r_ptr, y_ptr, m, n, r_row, y_row, GATED)


BLOCKS = TritonDecoder(decode_block, block_number, (torch.uint8,), levels=True, product=block_scaled_kernel)


def pack(codes: torch.Tensor, scale: torch.Tensor, outer: torch.Tensor | None, how: GroupRounding,
         family: str, gated: bool = False) -> TritonWeight:
    """Repack once.

    Args:
        codes: uint8 ``[n, k]``, 0 to 15.
        scale: uint8 ``[n, k / group]``: bytes of e4m3 (groups of 16) or e8m0 (of 32).
        outer: float32 ``[n]`` or one number: what e4m3 scales are multiples of.
        how: rows of x are rounded; packed, in columns of :data:`BK`.
        family: the GPUs' family.
        gated: rows are a gate's, then as many of what it opens.
    """
    n, k = codes.shape
    tiles = whole_tiles(codes, BK, gated)
    # scales of what is filled up must not be NaN
    parts = [tiles[:, ::2] | tiles[:, 1::2] << 4, whole_tiles(scale, BK // how.group, gated)]
    cut = [part.unflatten(0, (-1, ROWS)).unflatten(2, (tiles.shape[1] // BK, -1)).transpose(1, 2).flatten(2)
           for part in parts]
    numbers = None if outer is None else rows(outer.float().reshape(-1).expand(n), gated).contiguous()
    return TritonWeight(torch.cat(cut, 2).contiguous(), numbers, n, k, BK, 0,
                        "e4m3" if how.group == GROUPS[0] else "e8m0", family, BLOCKS, gated, inputs=how)
