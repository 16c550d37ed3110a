"""``y = x Wᵀ`` for weights in :mod:`~quantkit_kernels.triton.fragment` order: one kernel, any decoder.

The weights are the first operand, ``Yᵀ = W Xᵀ``: they are what is read, and few rows of activations fill
the other side of the matrix instruction without waste.

**A row's result doesn't depend on the other rows, nor, up to 128 of them, on how many there are.** With so
few rows, where one program for each 128 columns of y would leave most of the GPU idle, the sum over K is
cut into segments, by ``n`` and ``k`` alone; a second kernel adds them in order. There are no atomics, so the
same input always gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from quantkit_kernels.triton.fragment import MAGIC, ROWS, lane_columns

PROGRAMS = 256
"""Programs that a small multiply is cut into: two for each multiprocessor of a large GPU."""
SPLIT_ROWS = 128
"""Up to this many rows of activations K is cut; more fill the GPU without it."""
BLOCK = 512
"""Columns of y that one program adds up."""


@triton.jit(do_not_specialize=["m"])
def matmul_kernel(x_ptr: tl.tensor, w_ptr: tl.tensor, s_ptr: tl.tensor, y_ptr: tl.tensor, m: tl.tensor,
                  n: tl.tensor, magic: tl.tensor, K: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
                  WORDS: tl.constexpr, TILES: tl.constexpr, PER: tl.constexpr, SPLIT: tl.constexpr,
                  GROUP: tl.constexpr, NPAD: tl.constexpr, DECODE: tl.constexpr, MODE: tl.constexpr,
                  WIDE: tl.constexpr, STAGES: tl.constexpr) -> None:
    """128 columns of y by BM rows: their sum over one segment of K.

    x ``[m, K]``; w int32 ``[n / 128, TILES, WORDS]``; s float32 or int32 ``[K / GROUP, NPAD]``, or
    float32 ``[n]`` with GROUP 0; y ``[m, n]`` in x's dtype, or with SPLIT float32 ``[segments, m, n]``.
    """
    rn = tl.program_id(0) * 128 + tl.arange(0, 128)
    rm = tl.program_id(1) * BM + tl.arange(0, BM)
    rk = tl.arange(0, BK)
    first = tl.program_id(2) * PER
    last = tl.minimum(first + PER, TILES)
    x_row = x_ptr + rm.to(tl.int64)[None, :] * K
    w_tile = w_ptr + tl.program_id(0).to(tl.int64) * (TILES * WORDS) + tl.arange(0, WORDS)
    acc = tl.full([128, BM], 0.0, tl.float32)
    for i in tl.range(first, last, num_stages=STAGES):
        w = tl.load(w_tile + i * WORDS, eviction_policy="evict_first")
        k = i * BK + rk[:, None]
        seen = (rm < m)[None, :] if K % BK == 0 else (rm < m)[None, :] & (k < K)
        x = tl.load(x_row + k, mask=seen, other=0.0)
        if GROUP:
            s = tl.load(s_ptr + (i * BK // GROUP) * NPAD + rn)
            scale, a = DECODE(w, s, magic, x.dtype, BK, MODE, WIDE)
            acc += tl.dot(a, x, input_precision="ieee") * scale[:, None]
        else:
            a = DECODE(w, magic, x.dtype, BK, WIDE)
            acc = tl.dot(a, x, acc, input_precision="ieee")
    seen = (rm < m)[None, :] & (rn < n)[:, None]
    here = rm.to(tl.int64)[None, :] * n + rn[:, None]
    if SPLIT:
        tl.store(y_ptr + tl.program_id(2).to(tl.int64) * m * n + here, acc, mask=seen)
    else:
        if not GROUP:
            acc *= tl.load(s_ptr + rn, mask=rn < n, other=0.0)[:, None]
        tl.store(y_ptr + here, acc.to(y_ptr.dtype.element_ty), mask=seen)


@triton.jit(do_not_specialize=["m"])
def add_segments_kernel(part_ptr: tl.tensor, s_ptr: tl.tensor, y_ptr: tl.tensor, m: tl.tensor, n: tl.tensor,
                        SEGMENTS: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """y ``[m, n]`` = float32 ``part [SEGMENTS, m, n]`` added in order, times float32 ``s [n]`` if SCALED."""
    rn = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    total = tl.full([BLOCK], 0.0, tl.float32)
    for i in tl.static_range(SEGMENTS):
        total += tl.load(part_ptr + (i * m.to(tl.int64) + row) * n + rn, mask=rn < n, other=0.0)
    if SCALED:
        total *= tl.load(s_ptr + rn, mask=rn < n, other=0.0)
    tl.store(y_ptr + row * n + rn, total.to(y_ptr.dtype.element_ty), mask=rn < n)


@dataclass(frozen=True)
class Packed:
    """A weight ready for :func:`multiply`.

    Attributes:
        words: int32 ``[n / 128, tiles, words]``, n rounded up.
        scale: see :func:`matmul_kernel`.
        n, k: the logical shape.
        bk: columns of a tile.
        group: columns that share a scale; 0: a scale a row.
        mode: the decoder's own choice.
        family: of GPUs it was packed for, see :func:`~quantkit_kernels.triton.fragment.family_of`.
    """

    words: torch.Tensor
    scale: torch.Tensor
    n: int
    k: int
    bk: int
    group: int
    mode: str
    family: str

    @property
    def nbytes(self) -> int:
        """Bytes read by one multiply."""
        return sum(t.numel() * t.element_size() for t in (self.words, self.scale))


@dataclass(frozen=True)
class Plan:
    """How a multiply is launched. Only ``bm``, ``split`` and ``options`` depend on the number of rows."""

    bm: int
    split: bool
    per: int
    segments: int
    stages: int
    options: dict[str, int]


def plan(n: int, tiles: int, m: int, bk: int, family: str) -> Plan:
    """Segments of K by ``n`` and ``tiles`` (along K); the shape of a program by ``m``.

    Half a program's registers hold float32 sums: that is what bounds ``bm``.
    """
    blocks = -(-n // ROWS)
    wanted = max(1, min(PROGRAMS // blocks, tiles // 4))
    per = -(-tiles // wanted)
    most = 32 if family == "ampere" else 64 if bk == 32 else 128
    bm = next((size for size in (16, 32, 64) if m <= size and size < most), most)
    split = m <= SPLIT_ROWS and per < tiles
    warps = 4 if bm <= 32 or bk == 32 else 8
    if family == "cdna":  # a warp has 64 lanes
        warps = 2 if bk == 32 else 8 if bm == 128 else 4
        return Plan(bm, split, per, -(-tiles // per), 2, {"num_warps": warps})
    options = {"num_warps": warps}
    if family == "blackwell":  # without a bound ptxas gives up registers for occupancy, and spills
        options["maxnreg"] = 255
    return Plan(bm, split, per, -(-tiles // per), 4, options)


def arguments(w: Packed, m: int) -> tuple[Plan, dict[str, object]]:
    """The plan, and the kernel's compile-time arguments but the decoder."""
    tiles = w.words.shape[1]
    p = plan(w.n, tiles, m, w.bk, w.family)
    return p, {"K": w.k, "BM": p.bm, "BK": w.bk, "WORDS": w.words.shape[2], "TILES": tiles,
               "PER": p.per if p.split else tiles, "SPLIT": p.split, "GROUP": w.group,
               "NPAD": w.words.shape[0] * ROWS, "MODE": w.mode, "WIDE": lane_columns(w.family),
               "STAGES": p.stages}


def multiply(x: torch.Tensor, w: Packed, decode: Any) -> torch.Tensor:
    """``x [m, k]`` (bfloat16, float16, float32) → ``[m, n]`` in x's dtype; ``decode`` is a jitted decoder.

    Raises:
        ValueError: another shape or dtype.
    """
    if x.ndim != 2 or x.shape[1] != w.k or x.dtype not in MAGIC:
        raise ValueError(f"x must be [m, {w.k}] in bfloat16, float16 or float32, "
                         f"not {list(x.shape)} {x.dtype}")
    x, m = x.contiguous(), x.shape[0]
    y = x.new_empty(m, w.n)
    if m == 0:
        return y
    p, constants = arguments(w, m)
    target = x.new_empty(p.segments, m, w.n, dtype=torch.float32) if p.split else y
    grid = (w.words.shape[0], -(-m // p.bm), p.segments if p.split else 1)
    matmul_kernel[grid](x, w.words, w.scale, target, m, w.n, MAGIC[x.dtype], DECODE=decode,
                        **constants, **p.options)
    if p.split:
        add_segments_kernel[(-(-w.n // BLOCK), m)](target, w.scale, y, m, w.n, SEGMENTS=p.segments,
                                                  SCALED=not w.group, BLOCK=BLOCK)
    return y
