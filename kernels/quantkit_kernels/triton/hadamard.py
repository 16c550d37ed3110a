"""Multiplies rows by ``diag(signs) · (Hartley_m ⊗ Hadamard_a)``, for a width ``a · m``, m odd, a a power of
2.

This removes outliers from weights and keys: QuIP#, https://arxiv.org/abs/2402.04396, and QuaRot,
https://arxiv.org/abs/2404.00456. The factor a is computed by sums and differences of numbers that are
1, 2, 4 … apart; each number needs only its partner, which is in a register, another lane or shared memory.
The factor m is a small matrix, added term by term. Sums have the order of the same steps in torch, so results
equal torch's bit for bit.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

LONGEST = 32768
"""The largest power of two in a width."""
FEW = 8
"""Up to this many times a power of two a row stays in registers; wider rows go through memory in parts."""
WHOLE = 16384
"""Largest number of values of a row, or of a part, that one program has in registers."""
NUMBERS = 2048
"""Values of a program that handles several short rows."""
BLOCK = 128
"""Columns of each part that one program of :func:`mix_kernel` handles."""
FARTHEST = tl.constexpr(2.0**100)
"""Inputs are clamped to this absolute value, so that sums are finite."""


@triton.jit
def finite(x: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Convert float32 to DTYPE; numbers that are too large become its largest number."""
    limit = 3.4028234663852886e38
    if DTYPE.is_fp16():
        limit = 65504.0
    elif DTYPE.is_bf16():
        limit = 3.3895313892515355e38
    return tl.minimum(tl.maximum(x, -limit), limit).to(DTYPE)


@triton.jit
def within(x: tl.tensor, limit: tl.constexpr) -> tl.tensor:
    """Clamp to ``[−limit, limit]``."""
    return tl.minimum(tl.maximum(x, -limit), limit)


@triton.jit
def hadamard(x: tl.tensor, LOG: tl.constexpr) -> tl.tensor:
    """Apply the Hadamard transform to every 2^LOG neighbors of float32 ``[rows, n]``, without normalization.

    The partner of a number is found by adding a pair's bits as integers and subtracting its own: that is
    exact for any bits.
    """
    ROWS: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    for i in tl.static_range(LOG):
        pairs = x.reshape(ROWS, N // (2 << i), 2, 1 << i)
        bits = pairs.to(tl.int32, bitcast=True)
        other = (tl.sum(bits, 2, keep_dims=True) - bits).to(tl.float32, bitcast=True)
        second = (tl.arange(0, 2) == 1)[None, None, :, None]
        x = (other + tl.where(second, -pairs, pairs)).reshape(ROWS, N)
    return x


@triton.jit
def hartley(x: tl.tensor, mix_ptr: tl.tensor, COUNT: tl.constexpr, PADDED: tl.constexpr) -> tl.tensor:
    """Multiply float32 ``[rows, PADDED · a]``, of which COUNT · a are numbers, by float32
    ``mix [COUNT, COUNT]`` over the first factor."""
    ROWS: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    parts = x.reshape(ROWS, PADDED, N // PADDED)
    rm = tl.arange(0, PADDED)
    total = tl.full([ROWS, PADDED, N // PADDED], 0.0, tl.float32)
    for i in tl.static_range(COUNT):
        part = tl.sum(tl.where((rm == i)[None, :, None], parts, 0.0), 1, keep_dims=True)
        total += part * tl.load(mix_ptr + rm * COUNT + i, mask=rm < COUNT, other=0.0)[None, :, None]
    return total.reshape(ROWS, N)


@triton.jit
def mixed(x: tl.tensor, mix_ptr: tl.tensor, COUNT: tl.constexpr, PADDED: tl.constexpr, LOG: tl.constexpr,
          ROOT: tl.constexpr) -> tl.tensor:
    """Apply both factors: :func:`hadamard` of 2^LOG and :func:`hartley` of COUNT, then multiply by ROOT."""
    x = hadamard(x, LOG)
    if COUNT > 1:
        x = hartley(x, mix_ptr, COUNT, PADDED)
    return x * ROOT


@triton.jit(do_not_specialize=["m"])
def rotate_kernel(x_ptr: tl.tensor, signs_ptr: tl.tensor, mix_ptr: tl.tensor, y_ptr: tl.tensor, m: tl.tensor,
                  step: tl.tensor, N: tl.constexpr, COUNT: tl.constexpr, PADDED: tl.constexpr,
                  LOG: tl.constexpr, ROOT: tl.constexpr, ROWS: tl.constexpr, BACK: tl.constexpr) -> None:
    """Rotate ROWS whole rows: x ``[m, N]``, with ``step`` elements from a row to the next; y ``[m, N]``."""
    rm = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rn = tl.arange(0, PADDED << LOG)
    seen = (rm < m)[:, None] & (rn < N)[None, :]
    x = tl.load(x_ptr + rm.to(tl.int64)[:, None] * step + rn[None, :], mask=seen, other=0.0)
    x = within(x.to(tl.float32), FARTHEST)
    signs = tl.load(signs_ptr + rn, mask=rn < N, other=0.0)[None, :]
    y = mixed(x if BACK else x * signs, mix_ptr, COUNT, PADDED, LOG, ROOT)
    if BACK:
        y *= signs
    tl.store(y_ptr + rm.to(tl.int64)[:, None] * N + rn[None, :], finite(y, y_ptr.dtype.element_ty), mask=seen)


@triton.jit(do_not_specialize=["m"])
def parts_kernel(x_ptr: tl.tensor, signs_ptr: tl.tensor, t_ptr: tl.tensor, m: tl.tensor, step: tl.tensor,
                 COUNT: tl.constexpr, LOG: tl.constexpr, ROWS: tl.constexpr, BACK: tl.constexpr) -> None:
    """Transform ROWS parts of 2^LOG numbers; COUNT parts are a row. t is float32 ``[m, COUNT, 2^LOG]``."""
    part = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, place = part // COUNT, (part % COUNT)[:, None] << LOG
    rn = tl.arange(0, 1 << LOG)[None, :]
    seen = (row < m)[:, None] & (rn >= 0)
    x = tl.load(x_ptr + row[:, None] * step + place + rn, mask=seen, other=0.0)
    x = within(x.to(tl.float32), FARTHEST)
    if not BACK:
        x *= tl.load(signs_ptr + place + rn)
    tl.store(t_ptr + (part[:, None] << LOG) + rn, hadamard(x, LOG), mask=seen)


@triton.jit
def mix_kernel(t_ptr: tl.tensor, signs_ptr: tl.tensor, mix_ptr: tl.tensor, y_ptr: tl.tensor,
               COUNT: tl.constexpr, PADDED: tl.constexpr, LOG: tl.constexpr, ROOT: tl.constexpr,
               BLOCK: tl.constexpr, BACK: tl.constexpr) -> None:
    """Multiply the COUNT parts of a row by ``mix``, in BLOCK columns of each: y ``[m, COUNT · 2^LOG]``."""
    begin = tl.program_id(0).to(tl.int64) * (COUNT << LOG)
    rb = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    rm = tl.arange(0, PADDED)
    seen = (rm < COUNT)[:, None] & (rb < 1 << LOG)[None, :]
    total = tl.full([PADDED, BLOCK], 0.0, tl.float32)
    for i in tl.range(0, COUNT):
        part = tl.load(t_ptr + begin + (i << LOG) + rb, mask=rb < 1 << LOG, other=0.0)
        total += part[None, :] * tl.load(mix_ptr + rm * COUNT + i, mask=rm < COUNT, other=0.0)[:, None]
    total *= ROOT
    columns = (rm[:, None] << LOG) + rb[None, :]
    if BACK:
        total *= tl.load(signs_ptr + columns, mask=seen, other=0.0)
    tl.store(y_ptr + begin + columns, finite(total, y_ptr.dtype.element_ty), mask=seen)


def factors(n: int) -> dict[str, int | float]:
    """Return the compile-time arguments of :func:`mixed` for a width.

    The power of two is at most :data:`WHOLE`, so COUNT may be even.
    """
    span = min(n & -n, WHOLE)
    return {"COUNT": n // span, "PADDED": triton.next_power_of_2(n // span), "LOG": span.bit_length() - 1,
            "ROOT": 1 / math.sqrt(n & -n)}


def constants(n: int) -> dict[str, int | float] | None:
    """Return the compile-time arguments and options of :func:`rotate_kernel`; ``None`` if rows are too
    wide."""
    arguments = factors(n)
    padded = int(arguments["PADDED"]) << int(arguments["LOG"])
    if arguments["COUNT"] > FEW or padded > WHOLE:
        return None
    rows = max(1, NUMBERS // padded)
    return {"N": n, "ROWS": rows, **arguments, **_options(rows * padded)}


def part_constants(n: int) -> tuple[dict[str, int | float], dict[str, int | float]]:
    """Return the compile-time arguments and options of :func:`parts_kernel` and of :func:`mix_kernel`."""
    arguments = factors(n)
    span = 1 << int(arguments["LOG"])
    rows = max(1, NUMBERS // span)
    parts = {"COUNT": arguments["COUNT"], "LOG": arguments["LOG"], "ROWS": rows, **_options(rows * span)}
    block = min(BLOCK, span)
    return parts, {**arguments, "BLOCK": block, "enable_fp_fusion": False,
                   "num_warps": max(1, min(8, block * int(arguments["PADDED"]) // 1024))}


def _options(numbers: int) -> dict[str, int]:
    return {"num_warps": max(1, min(16, numbers // 1024)), "enable_fp_fusion": False}


def apply_hadamard(x: torch.Tensor, signs: torch.Tensor, mix: torch.Tensor, out: torch.Tensor | None = None,
                   *, back: bool = False) -> torch.Tensor:
    """Multiply every row by the rotation R, or with ``back`` by its inverse.

    The transform without signs is symmetric and its own inverse, so the inverse only applies signs last.

    Args:
        x: ``[m, n]``, bfloat16, float16 or float32; rows may have gaps between them. n is an odd number times
            a power of two up to 32768.
        signs: float32 ``[n]`` of 1 and −1.
        mix: float32 ``[n / a, n / a]``, the Hartley transform.
        out: contiguous ``[m, n]`` in x's dtype.

    Returns:
        ``[m, n]``, summed in float32. Inputs are clamped to ±2^100; a result that is too large for x's dtype
        becomes its largest number.

    Raises:
        ValueError: shapes or dtypes don't match.
    """
    m, n = x.shape
    span = n & -n
    y = x.new_empty(m, n) if out is None else out
    if (signs.shape != (n,) or mix.shape != (n // span, n // span) or span > LONGEST or y.shape != x.shape
            or y.dtype != x.dtype or not signs.dtype == mix.dtype == torch.float32
            or not y.is_contiguous() or not signs.is_contiguous() or not mix.is_contiguous()):
        raise ValueError(f"rows {list(x.shape)}, signs {list(signs.shape)}, mix {list(mix.shape)} and out "
                         f"{list(y.shape)} don't fit together")
    if m == 0:
        return y
    x = x if x.stride(1) == 1 else x.contiguous()
    if (launch := constants(n)) is not None:
        rotate_kernel[(-(-m // int(launch["ROWS"])),)](x, signs, mix, y, m, x.stride(0), BACK=back, **launch)
        return y
    parts, mixes = part_constants(n)
    if span > WHOLE:  # the last step of the Hadamard transform becomes part of the small matrix
        halves = torch.stack((mix, mix), -1), torch.stack((mix, -mix), -1)
        mix = torch.stack(halves, 1).view(2 * len(mix), -1)
    transformed = torch.empty(m, n, dtype=torch.float32, device=x.device)
    parts_kernel[(-(-m * int(parts["COUNT"]) // int(parts["ROWS"])),)](x, signs, transformed, m, x.stride(0),
                                                                      BACK=back, **parts)
    mix_kernel[(m, -(-(1 << int(parts["LOG"])) // int(mixes["BLOCK"])))](transformed, signs, mix, y,
                                                                         BACK=back, **mixes)
    return y
