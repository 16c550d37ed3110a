"""A packed weight as numbers, row by row, for a library's product of many rows.

Our own product decodes a weight again for every 128 rows of activations, and a library's runs at the tensor
cores' speed. From some hundred rows on it is faster to decode once, into memory that all weights share, and
to let a library multiply. Numbers are rounded once, to the activations' dtype, and levels of NF4 before that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quantkit_kernels.triton.epilogue import finish, opened
from quantkit_kernels.triton.fragment import MAGIC, ROWS, family_of
from quantkit_kernels.triton.group_scales import fine_at, scales_at
from quantkit_kernels.triton.matmul import Gate, arguments, is_gate
from quantkit_kernels.triton.packed import FLOATS, TritonWeight
from quantkit_kernels.triton.trellis import ready

TILES = 4
"""Tiles of a program, one after the other: the next one's words are loaded meanwhile."""
COLUMNS = 1024
"""Numbers of a row that one program gates."""


@triton.jit
def dequantize_kernel(w_ptr: tl.tensor, s_ptr: tl.tensor, y_ptr: tl.tensor, n: tl.tensor, magic: tl.tensor,
                      table_ptr: tl.tensor, K: tl.constexpr, BK: tl.constexpr, WORDS: tl.constexpr,
                      TILES: tl.constexpr, GROUP: tl.constexpr, NPAD: tl.constexpr, DECODE: tl.constexpr,
                      MODE: tl.constexpr, WIDE: tl.constexpr, LAYOUT: tl.constexpr, LOWS: tl.constexpr,
                      MIDDLE: tl.constexpr, BITS: tl.constexpr, RINGS: tl.constexpr, IN_TURN: tl.constexpr,
                      GATED: tl.constexpr, PER: tl.constexpr) -> None:
    """PER tiles of 128 rows → ``y [n, K]``. With GATED rows of a gate and of what it opens lie in turn, by
    eight; in y the gate's come first. The other arguments: see
    :func:`~quantkit_kernels.triton.matmul.matmul_kernel`."""
    D: tl.constexpr = y_ptr.dtype.element_ty
    block = tl.program_id(0)
    inner = tl.arange(0, 128)
    if IN_TURN:
        inner = inner // 8 % 2 * 64 + inner // 16 * 8 + inner % 8
    stored = block * 128 + inner
    row, seen = stored, stored < n
    if GATED:
        feature = block * 64 + inner // 16 * 8 + inner % 8
        row, seen = inner // 8 % 2 * (n // 2) + feature, feature < n // 2
    rk = tl.arange(0, BK)
    w_here = w_ptr + block.to(tl.int64) * (TILES * WORDS)
    if not RINGS:
        w_here += tl.arange(0, WORDS)
    table = ready(table_ptr, D, MODE) if RINGS else 0
    first = tl.program_id(1) * PER
    for i in range(first, tl.minimum(first + PER, TILES)):
        w = w_here + i * WORDS
        if not RINGS:
            w = tl.load(w, eviction_policy="evict_first")
        s = table if RINGS else w
        if LAYOUT == "fine":
            s = fine_at(s_ptr, block.to(tl.int64) * TILES + i, tl.arange(0, WORDS), NPAD, WORDS, BITS, MODE)
        if GROUP and LAYOUT == "word":
            s = tl.load(s_ptr + i * BK // GROUP * NPAD + stored)
            scale, a = DECODE(w, s, magic, D, BK, MODE, WIDE)
            a = a.to(tl.float32) * scale[:, None]
        else:
            _, a = DECODE(w, s, magic, D, BK, MODE, WIDE)
            if GROUP:
                scale, low = scales_at(s_ptr, i * BK // GROUP, stored, NPAD, LAYOUT)
                a = a.to(tl.float32) + MIDDLE
                a = tl.fma(a, scale[:, None], low[:, None]) if LOWS else a * scale[:, None]
            elif s_ptr is not None:
                a = a.to(tl.float32) * tl.load(s_ptr + stored)[:, None]
        k = i * BK + rk
        tl.store(y_ptr + row.to(tl.int64)[:, None] * K + k[None, :], a.to(D),
                 mask=seen[:, None] & (k < K)[None, :])


@triton.jit
def gate_kernel(x_ptr: tl.tensor, y_ptr: tl.tensor, n: tl.tensor, x_row: tl.tensor, KIND: tl.constexpr,
                BLOCK: tl.constexpr) -> None:
    """``x [m, 2 n]``, a gate and what it opens side by side, rows x_row apart → ``y [m, n]``."""
    index = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seen = column < n
    gate = tl.load(x_ptr + index * x_row + column, mask=seen, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + index * x_row + n + column, mask=seen, other=0.0).to(tl.float32)
    tl.store(y_ptr + index * n + column, opened(gate, up, KIND).to(y_ptr.dtype.element_ty), mask=seen)


def reason_against(w: TritonWeight) -> str | None:
    """Why a weight isn't made of numbers that a library could multiply; ``None``: it is."""
    if w.decoder.levels or w.decoder.product is not None:
        return "it multiplies activations that are rounded for it"
    return None


def dequantize(w: TritonWeight, out: torch.Tensor) -> torch.Tensor:
    """The weight's numbers, a gate's rows before those that it opens.

    Args:
        out: bfloat16, float16 or float32 (plain weights: of their dtype), one-dimensional, of at least
            ``n · k`` numbers, where the result goes.

    Returns:
        ``[n, k]``, the beginning of ``out``.

    Raises:
        ValueError: the weight isn't made of numbers, or ``out`` doesn't fit.
    """
    reason = reason_against(w)
    if reason is None and (out.ndim != 1 or out.dtype not in FLOATS or out.numel() < w.n * w.k):
        reason = f"out must have {w.n} · {w.k} numbers in a row, not {list(out.shape)} {out.dtype}"
    if reason is not None:
        raise ValueError(f"the weight isn't dequantized: {reason}")
    y = out[:w.n * w.k].view(w.n, w.k)
    grid = (w.words.shape[0], -(-w.words.shape[1] // TILES))
    dequantize_kernel[grid](w.words, w.scale, y, w.n, MAGIC[out.dtype], w.table, **constants(w))
    return y


def reason_against_levels(w: TritonWeight) -> str | None:
    """Why a library couldn't multiply a weight's levels by those of activations; ``None``: it could."""
    if not w.decoder.levels or w.inputs is not None or w.mode not in ("int8", "e4m3"):
        return "it has no levels that are multiplied as they are"
    return None


def packed_rows(w: TritonWeight) -> int:
    """Rows of the weight with the padding that it is packed with."""
    return w.words.shape[0] * ROWS


def levels_of(w: TritonWeight, out: torch.Tensor) -> torch.Tensor:
    """The weight's levels as they are multiplied, in the order in which its rows are packed.

    Args:
        out: uint8, one-dimensional, of at least ``rows · k`` bytes; rows are those with the padding.

    Returns:
        int8 or float8_e4m3fn ``[rows, k]``, the beginning of ``out``.

    Raises:
        ValueError: the weight has no such levels, or ``out`` doesn't fit.
    """
    rows = packed_rows(w)
    reason = reason_against_levels(w)
    if reason is None and (out.ndim != 1 or out.dtype != torch.uint8 or out.numel() < rows * w.k):
        reason = f"out must have {rows} · {w.k} bytes in a row, not {list(out.shape)} {out.dtype}"
    if reason is not None:
        raise ValueError(f"the weight's levels aren't laid out: {reason}")
    y = out[:rows * w.k].view(w.decoder.takes[0]).view(rows, w.k)
    grid = (w.words.shape[0], -(-w.words.shape[1] // TILES))
    dequantize_kernel[grid](w.words, None, y, rows, 0, w.table, **constants(w) | {"GATED": False})
    return y


@triton.jit
def finish_kernel(sum_ptr: tl.tensor, t_ptr: tl.tensor, s_ptr: tl.tensor, b_ptr: tl.tensor, r_ptr: tl.tensor,
                  y_ptr: tl.tensor, m: tl.tensor, n: tl.tensor, r_row: tl.tensor, y_row: tl.tensor,
                  NPAD: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """y from ``sum [m, NPAD]``: see :func:`~quantkit_kernels.triton.epilogue.finish`."""
    first, row = tl.program_id(0) * BLOCK, tl.program_id(1)
    inner = tl.arange(0, BLOCK)
    rm = row + tl.arange(0, 1)
    total = tl.load(sum_ptr + row.to(tl.int64) * NPAD + first + inner[:, None] + rm[None, :] * 0)
    finish(total, first, inner, rm, t_ptr, s_ptr, b_ptr, r_ptr, y_ptr, m, n, r_row, y_row, GATED)


def finish_sums(sums: torch.Tensor, scale: torch.Tensor, w: TritonWeight, y: torch.Tensor, *,
                bias: torch.Tensor | None = None, residual: torch.Tensor | None = None,
                gated: Gate | None = None) -> None:
    """What :func:`~quantkit_kernels.triton.matmul.multiply` does with its sums, to a library's.

    Args:
        sums: int32 or float32 ``[m, rows]`` by the rows of :func:`levels_of`.
        scale: the scales of the m tokens.
        y: ``[m, outputs]``, where the result goes; its rows may lie further apart.
        bias, residual, gated: as there.
    """
    m, padded = sums.shape
    block = next(size for size in (1024, 512, 256, ROWS) if padded % size == 0)
    if m:
        finish_kernel[(padded // block, m)](
            sums, scale, w.scale, bias, residual, y, m, w.outputs, 0 if residual is None else
            residual.stride(0), y.stride(0), NPAD=padded, GATED=gated, BLOCK=block, num_warps=4)


def constants(w: TritonWeight) -> dict[str, object]:
    """Compile-time arguments of the kernel, and how it is launched."""
    _, every = arguments(w, 1)
    lanes = 64 if w.family == "cdna" else 32
    wide = w.words.shape[2] * w.words.element_size() // (16 * lanes)  # warps that load 16 bytes a lane
    warps = min(4 if w.bk <= 64 else 8, 1 << (wide.bit_length() - 1))
    # without a bound ptxas gives up registers for occupancy there, and spills
    bound = {"maxnreg": 255} if w.family in ("ampere", "blackwell") else {}
    return {name: value for name, value in every.items() if name in dequantize_kernel.arg_names} | {
        "GATED": w.gated, "PER": TILES, "num_warps": warps} | bound


def apply_gate(x: torch.Tensor, activation: Gate) -> torch.Tensor:
    """What a gate opens, in float32, rounded once.

    Args:
        x: ``[m, 2 n]``: gates, and what they open; any floating dtype.
        activation: see :data:`~quantkit_kernels.triton.matmul.Gate`.

    Returns:
        ``[m, n]`` in x's dtype.

    Raises:
        ValueError: another activation, or an odd number of columns.
    """
    m, both = x.shape
    if not is_gate(activation) or both % 2:
        raise ValueError(f"the activation must be one that is known, of an even number of columns, not "
                         f"{activation} of {both}")
    y = x.new_empty(m, both // 2)
    if m:
        x = x if x.stride(1) == 1 else x.contiguous()
        gate_kernel[(m, -(-(both // 2) // COLUMNS))](
            x, y, both // 2, x.stride(0), KIND=activation, BLOCK=COLUMNS,
            num_warps=gate_warps(family_of(x.device)))
    return y


def gate_warps(family: str) -> int:
    """Warps of a program of :func:`gate_kernel`, whose lanes load 16 bytes each."""
    return 2 if family == "cdna" else 4
