"""``y = x Wᵀ`` for weights in :mod:`~quantkit_kernels.triton.fragment` order: one kernel, any decoder.

The weights are the first operand, ``Yᵀ = W Xᵀ``: they are what is read, and few rows of activations fill
the other side of the matrix instruction without waste.

**A row's result doesn't depend on the other rows, nor on how many there are.** The sum over K is cut into
segments, by ``n`` and ``k`` alone. With few rows, where one program for each 128 columns of y would leave
most of the GPU idle, each segment is a program's, and the last program of a tile adds them in order; with
many, a program goes through all of them and adds them in the same order. So the same input always gives the
same bits: see :mod:`~quantkit_kernels.triton.arrivals`. Integers are exact in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from quantkit_kernels import tuned
from quantkit_kernels.triton import dependent
from quantkit_kernels.triton.arrivals import counters
from quantkit_kernels.triton.dependent import fetch, let_next_begin, wait
from quantkit_kernels.triton.epilogue import finish, finish_segments
from quantkit_kernels.triton.fragment import MAGIC, ROWS, lane_columns
from quantkit_kernels.triton.group_scales import MINIMA, fine_at, scales_at
from quantkit_kernels.triton.levels import QuantizedActivations
from quantkit_kernels.triton.packed import TritonWeight, bits
from quantkit_kernels.triton.trellis import LAYOUT, ready

PROGRAMS = 256
"""Programs that a small multiply is cut into: two for each multiprocessor of a large GPU."""
SPLIT_ROWS = 128
"""Above this number of rows of activations segments never become programs: their sums would be
more to write and read than the weights."""
GATES = ("silu", "gelu_tanh")
Gate = str | float
"""One of :data:`GATES`, or the limit of a clamped SiLU: see
:func:`~quantkit_kernels.triton.epilogue.opened`."""


@triton.jit(do_not_specialize=["m"])
def matmul_kernel(x_ptr: tl.tensor, t_ptr: tl.tensor, w_ptr: tl.tensor, s_ptr: tl.tensor, b_ptr: tl.tensor,
                  r_ptr: tl.tensor, y_ptr: tl.tensor, m: tl.tensor, n: tl.tensor, x_row: tl.tensor,
                  r_row: tl.tensor, y_row: tl.tensor, magic: tl.tensor, table_ptr: tl.tensor,
                  tile_ptr: tl.tensor, order_ptr: tl.tensor, part_ptr: tl.tensor, count_ptr: tl.tensor,
                  K: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, WORDS: tl.constexpr,
                  TILES: tl.constexpr, PER: tl.constexpr, SPLIT: tl.constexpr, GROUP: tl.constexpr,
                  NPAD: tl.constexpr, DECODE: tl.constexpr, MODE: tl.constexpr, WIDE: tl.constexpr,
                  GATED: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr, FRESH: tl.constexpr,
                  PDL: tl.constexpr, LAYOUT: tl.constexpr, LOWS: tl.constexpr, MIDDLE: tl.constexpr,
                  BITS: tl.constexpr, RINGS: tl.constexpr, IN_TURN: tl.constexpr, BLOCKS: tl.constexpr,
                  CHOSEN: tl.constexpr, CDNA: tl.constexpr) -> None:
    """128 rows of the weight by BM rows of x.

    x ``[m, K]``, rows x_row apart; w ``[NPAD / 128, TILES, WORDS]``; s ``[K / GROUP, NPAD]``, or float32
    ``[NPAD]`` with GROUP 0; the rest: see :func:`~quantkit_kernels.triton.epilogue.finish`. A segment is PER
    tiles; with SPLIT it is a program's, and part and count are for
    :func:`~quantkit_kernels.triton.epilogue.finish_segments`, else ``None``. FRESH: see
    :func:`sums_tiles_apart`. LAYOUT: of s, with LOWS if it has minima, of what is MIDDLE more than numbers.
    RINGS: see :mod:`~quantkit_kernels.triton.trellis`. IN_TURN: the halves of a tile's rows lie in turn, by
    eight rows. tile, order, with BLOCKS of an expert and as many experts CHOSEN for a row of x: see
    :mod:`~quantkit_kernels.triton.experts`; then m is the number of pairs, and y has a row for each.
    """
    inner = tl.arange(0, 128)
    if IN_TURN:
        inner = inner // 8 % 2 * 64 + inner // 16 * 8 + inner % 8
    block = tl.program_id(0)
    rm = tl.program_id(1) * BM + tl.arange(0, BM)
    rx, scale_ptr, bias_ptr = rm, s_ptr, b_ptr
    if tile_ptr is not None:
        tile_ptr += 3 * tl.program_id(1)
        expert, begin, count = tl.load(tile_ptr), tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
        if count == 0:
            return
        rm = tl.load(order_ptr + begin + tl.arange(0, BM), mask=tl.arange(0, BM) < count, other=m)
        rx = rm // CHOSEN
        block += expert * BLOCKS
        if s_ptr is not None:
            scale_ptr += expert * (BLOCKS * 128)
        if b_ptr is not None:
            bias_ptr += expert * (n if GATED is None else 2 * n)
    rn = block * 128 + inner
    rk = tl.arange(0, BK)
    first = tl.program_id(2) * PER if SPLIT else 0
    last = tl.minimum(first + PER, TILES) if SPLIT else TILES
    SUM: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty.is_int8() else tl.float32
    # a segment's sum joins the others as soon as it is complete; whole numbers needn't be kept apart
    APART: tl.constexpr = not SPLIT and TILES > PER and SUM.is_floating()
    x_here = x_ptr + rx.to(tl.int64)[None, :] * x_row
    w_here = w_ptr + block.to(tl.int64) * (TILES * WORDS)
    if not RINGS:
        w_here += tl.arange(0, WORDS)
    if PDL:
        let_next_begin()
        start = w_ptr + (block.to(tl.int64) * TILES + first) * WORDS
        fetch(start, (last - first) * WORDS)
        wait()
    table = ready(table_ptr, x_ptr.dtype.element_ty, MODE) if RINGS else 0
    total = tl.zeros([128, BM], SUM)
    acc = tl.zeros([128, BM], SUM)
    for i in tl.range(first, last, num_stages=STAGES, loop_unroll_factor=UNROLL):
        w = w_here + i * WORDS
        if not RINGS:
            w = tl.load(w, eviction_policy="evict_first")
        k = i * BK + rk[:, None]
        seen = (rm < m)[None, :] if K % BK == 0 else (rm < m)[None, :] & (k < K)
        x = tl.load(x_here + k, mask=seen, other=0.0)
        if GROUP and not LOWS:
            if LAYOUT == "word":
                s = tl.load(s_ptr + (i * BK // GROUP) * NPAD + rn)
                scale, a = DECODE(w, s, magic, x.dtype, BK, MODE, WIDE)
            else:
                scale, _ = scales_at(s_ptr, i * BK // GROUP, rn, NPAD, LAYOUT)
                _, a = DECODE(w, w, magic, x.dtype, BK, MODE, WIDE)
            acc += tl.dot(a, x, input_precision="ieee") * scale[:, None]
        else:
            s = table if RINGS else w
            if LAYOUT == "fine":
                tile = block.to(tl.int64) * TILES + i
                s = fine_at(s_ptr, tile, tl.arange(0, WORDS), NPAD, WORDS, BITS, MODE)
            _, a = DECODE(w, s, magic, x.dtype, BK, MODE, WIDE)
            if LOWS:  # each weight is rounded once; a sum of x for each group would cost as much as a product
                scale, low = scales_at(s_ptr, i * BK // GROUP, rn, NPAD, LAYOUT)
                NATIVE: tl.constexpr = (LAYOUT == "bfloat16 low" and x.dtype.is_bf16()) or (
                    LAYOUT == "float16 low" and x.dtype.is_fp16())
                if NATIVE:  # compilers fuse this in pairs, tl.fma one by one
                    a = a if MIDDLE == 0 else a + MIDDLE
                    a = a * scale.to(x.dtype)[:, None] + low.to(x.dtype)[:, None]
                else:
                    a = tl.fma(a.to(tl.float32), scale[:, None], (low + MIDDLE * scale)[:, None]).to(x.dtype)
            if FRESH:
                # not +=, which Triton turns into a product that goes on with acc
                acc = tl.fma(tl.dot(a, x, input_precision="ieee"), 1.0, acc)
            else:
                acc = tl.dot(a, x, acc, input_precision="ieee", out_dtype=SUM)
        if APART:  # noqa: SIM102 - a constant, and a number on the device
            if i % PER == PER - 1:
                total += acc
                acc = tl.zeros([128, BM], SUM)
    if APART:
        acc += total
    begin = tl.program_id(0) * 128
    row_scale = None if GROUP else scale_ptr
    if SPLIT:
        finish_segments(acc, part_ptr, count_ptr, begin, inner, t_ptr, row_scale, bias_ptr, r_ptr, y_ptr, m,
                        n, r_row, y_row, NPAD, (TILES + PER - 1) // PER, GATED, CDNA)
    else:
        finish(acc, begin, inner, rm, t_ptr, row_scale, bias_ptr, r_ptr, y_ptr, m, n, r_row, y_row, GATED)


@dataclass(frozen=True)
class LaunchPlan:
    """How a multiply is launched. ``per`` tiles are a segment, ``unroll`` a turn of the loop; of ``stages``
    turns all but one are loaded ahead. ``per`` and ``segments`` don't depend on the number of rows.
    ``early``: see :mod:`~quantkit_kernels.triton.dependent`."""

    bm: int
    split: bool
    per: int
    segments: int
    unroll: int
    stages: int
    early: bool
    options: dict[str, int]


def plan(n: int, tiles: int, m: int, bk: int, family: str, grouped: bool = False,
         measured: dict[str, int] | None = None, wide: bool = False) -> LaunchPlan:
    """Segments of K by ``n`` and ``tiles`` (along K); the shape of a program by ``m``. What was ``measured``
    comes first: see :func:`quantkit_kernels.tuned.lookup`.

    A program's registers hold float32 sums: of a segment, of all segments before it, and ``grouped`` those of
    a tile. That is what bounds ``bm``. ``wide``: weights have 8 bits, and scales that aren't of rows alone.
    """
    measured = measured or {}
    blocks = -(-n // ROWS)
    wanted = measured.get("segments", max(1, min(PROGRAMS // blocks, tiles // 4)))
    # with few rows the loop itself costs much beside what is done to a narrow tile
    unroll = 1 if bk >= 128 or family == "cdna" else 4 if grouped and not (wide and bk > 32) else 2
    per = -(-tiles // (wanted * unroll)) * unroll
    segments = -(-tiles // per)
    # of a router's few rows addresses aren't multiples of anything, and take registers
    small = n < ROWS or bk == 32 or (grouped and segments > 1)
    limit = 32 if family == "ampere" else 64 if small else 128
    bm = measured.get("bm", next((size for size in (16, 32, 64) if m <= size and size < limit), limit))
    split = segments > 1 and m <= SPLIT_ROWS and blocks * -(-m // bm) < PROGRAMS // 2
    warps = measured.get("warps", 4 if bm <= 32 or bk == 32 else 8)
    if family == "cdna":  # a warp has 64 lanes; the instruction is the same for any number of rows
        warps = measured.get("warps", 2 if bk == 32 else 8 if bm == 128 else 4)
        return LaunchPlan(bm, split, per, segments, unroll, measured.get("stages", 2), False,
                          {"num_warps": warps, "matrix_instr_nonkdim": 16})
    options = {"num_warps": warps}
    # without a bound ptxas gives up registers for occupancy, and spills
    if family in ("ampere", "blackwell"):
        options["maxnreg"] = 255
    # Ampere has no room in registers for two tiles and this number of rows
    unroll = unroll if bm <= (16 if family == "ampere" else 32) else 1
    stages = measured.get("stages", 4 if unroll == 1 else 3)
    early = bool(measured.get("pdl", 0)) and family in dependent.FAMILIES
    if early:
        options["launch_pdl"] = True
    return LaunchPlan(bm, split, per, segments, unroll, stages, early, options)


def sums_tiles_apart(w: TritonWeight) -> bool:
    """Whether the tensor cores add up one tile at a time, and other instructions add the tiles.

    Hopper's read decoded weights from registers while the program goes on. If the sum is carried from tile to
    tile, Triton before 3.9 lets the next tile's weights overwrite those that are still being read
    (https://github.com/triton-lang/triton/issues/9433), or ptxas waits after every instruction. A sum that is
    used at once is waited for once. Tensor cores that multiply fp8 also drop bits of long sums.
    """
    takes = w.decoder.takes
    return torch.float8_e4m3fn in takes or (w.family == "hopper" and torch.int8 not in takes)


def arguments(w: TritonWeight, m: int) -> tuple[LaunchPlan, dict[str, Any]]:
    """The plan, and the kernel's compile-time arguments but GATED."""
    tiles = w.words.shape[1]
    rings = w.layout == LAYOUT
    grouped = w.group > 0 or torch.float8_e4m3fn in w.decoder.takes or rings
    name = tuned.kernel_name(w.decoder.tile, w.mode)
    wide = bits(w) == 8 and (w.group > 0 or w.layout == "fine")
    p = plan(w.n, tiles, m, w.bk, w.family, grouped,
             tuned.lookup(w.words.device, name, w.n, w.k, w.group, m), wide)
    compiled = w.words.is_cuda or w.words.is_meta
    every = {"K": w.k, "BM": p.bm, "BK": w.bk, "WORDS": w.words.shape[2], "TILES": tiles, "PER": p.per,
               "SPLIT": p.split, "GROUP": w.group, "NPAD": w.words.shape[0] * ROWS, "DECODE": w.decoder.tile,
               "MODE": w.mode, "WIDE": lane_columns(w.family), "STAGES": p.stages,
               "UNROLL": p.unroll, "FRESH": sums_tiles_apart(w), "PDL": p.early, "LAYOUT": w.layout,
               "LOWS": w.layout in MINIMA, "MIDDLE": w.decoder.zero_level, "BITS": bits(w),
               "RINGS": rings, "IN_TURN": rings and not w.gated, "BLOCKS": 0, "CHOSEN": 0,
               "CDNA": compiled and w.family == "cdna", "INSTRUCTION": compiled}
    names = kernel_of(w).arg_names
    return p, {name: value for name, value in every.items() if name in names}


def kernel_of(w: TritonWeight) -> Any:
    """The kernel that multiplies it."""
    return w.decoder.product or matmul_kernel


def multiply(x: torch.Tensor | QuantizedActivations, w: TritonWeight, *, out: torch.Tensor | None = None,
             bias: torch.Tensor | None = None, residual: torch.Tensor | None = None,
             gated: Gate | None = None) -> torch.Tensor:
    """``y = x Wᵀ``, then ``+ bias``, then ``act(gate) · up``, then ``+ residual``.

    All of it in float32, rounded once, when y is stored; a model that does one after the other rounds to its
    dtype in between. Scales of :class:`~quantkit_kernels.triton.levels.QuantizedActivations` multiply the
    sum, first those of tokens.

    Args:
        x: ``[m, k]``, bfloat16, float16 or float32 (plain weights: of their dtype), or
            ``QuantizedActivations`` for weights that take them. Rows may lie further apart than k.
        w: the result of a format's ``pack``.
        out: ``[m, outputs]``, where y goes; its rows may lie further apart. Nothing else is allocated for y.
        bias: the bias, ``[n]``.
        residual: like y; may be ``out`` itself.
        gated: a :data:`Gate`, for weights that were packed ``gated``.

    Returns:
        ``[m, outputs]`` in x's dtype; ``outputs`` is n, or n / 2 if gated.

    Raises:
        ValueError: another shape or dtype.
    """
    values = x.values if isinstance(x, QuantizedActivations) else x
    _check(x, values, w, out, bias, residual, gated)
    m, n = values.shape[0], w.outputs
    y = torch.empty(m, n, dtype=x.dtype, device=values.device) if out is None else out
    if m == 0:
        return y
    if values.stride(1) != 1:
        values = values.contiguous()
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    p, constants = arguments(w, m)
    part = count = None
    if p.split:
        part = torch.empty(p.segments, m, constants["NPAD"], device=values.device,
                           dtype=torch.int32 if values.dtype == torch.int8 else torch.float32)
        count = counters(values.device)
    kernel = kernel_of(w)
    tables = {name: value for name, value in (("table_ptr", w.table), ("tile_ptr", None), ("order_ptr", None))
              if name in kernel.arg_names}
    kernel[w.words.shape[0], -(-m // p.bm), p.segments if p.split else 1](
        values, x.scale if isinstance(x, QuantizedActivations) else None, w.words, w.scale, bias, residual, y,
        m, n, values.stride(0), 0 if residual is None else residual.stride(0), y.stride(0),
        MAGIC.get(values.dtype, 0), part_ptr=part, count_ptr=count, **tables, GATED=gated, **constants,
        **p.options)
    return y


def is_gate(gated: Gate | None) -> bool:
    """Whether it is a :data:`Gate`."""
    return gated in GATES or (isinstance(gated, float) and gated > 0)


def _check(x: torch.Tensor | QuantizedActivations, values: torch.Tensor, w: TritonWeight, out: torch.Tensor
           | None,
           bias: torch.Tensor | None, residual: torch.Tensor | None, gated: Gate | None) -> None:
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in w.decoder.takes)
    if w.decoder.levels != isinstance(x, QuantizedActivations):
        raise ValueError("this weight takes Levels" if w.decoder.levels else "this weight takes no Levels")
    takes = (w.words.dtype,) if w.words.dtype in w.decoder.takes else w.decoder.takes
    if values.ndim != 2 or values.shape[1] != w.columns or values.dtype not in takes:
        raise ValueError(f"x must be [m, {w.columns}] in {names}, not {list(values.shape)} {values.dtype}")
    if is_gate(gated) != w.gated or (gated is not None and not w.gated):
        raise ValueError(f"gated must be {' or '.join(GATES)} or a limit for weights that were packed so, "
                         f"and nothing for others, not {gated}")
    shape = (values.shape[0], w.outputs)
    if out is not None and (out.shape != shape or out.stride(1) != 1 or out.dtype != x.dtype):
        raise ValueError(f"out must be {list(shape)} in x's dtype, rows contiguous, "
                         f"not {list(out.shape)} {out.dtype}")
    if residual is not None and residual.shape != shape:
        raise ValueError(f"residual must be {list(shape)}, not {list(residual.shape)}")
    if bias is not None and (bias.shape != (w.n,) or not bias.is_contiguous()):
        raise ValueError(f"bias must be [{w.n}], not {list(bias.shape)}")
