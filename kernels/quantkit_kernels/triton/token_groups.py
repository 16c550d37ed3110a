"""Activations rounded to 4- or 8-bit floating point as they come: a scale for each group of a row.

In groups of 16 (NVFP4, https://arxiv.org/abs/2509.25149) a scale is ``max|x| / 6`` times a number of the
layer's, rounded to e4m3; one that is rounded to 0 is 0.125 instead, beside which all levels are 0. In larger
groups (MXFP4, https://arxiv.org/abs/2310.10537) it is the power of 2 of ``max|x|``, which is rounded up from
1.75 of it on, over 4. Levels are those of e2m1, the nearest, ties to even. With 8 bits levels are e4m3's and
a scale is ``max|x| / 448`` in float32, as in DeepSeek-V3 (https://arxiv.org/abs/2412.19437). A group that
isn't finite has the scale NaN.

Rows come out in one of two ways. *Values*: level times scale, without the layer's number, in the dtype of the
activations; six significant bits at most, so that this is exact. float16 gets half of what groups of 32 or
more say, because the largest level may be above its range; there an odd multiple of 2⁻²⁴ is rounded again.
With 8 bits level times scale is rounded once more, to the dtype of the activations.
*Packed*: for tensor cores that multiply such groups. Either way a float32 number for each row multiplies the
sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quantkit_kernels.triton.dependent import let_next_begin, starts
from quantkit_kernels.triton.levels import QuantizedActivations

FINE = 16
"""Numbers of a group whose scale is e4m3."""
BLOCK = 1024
"""Numbers of a row that one program rounds, at most."""
LARGEST = tl.constexpr(3.4028234663852886e38)


@dataclass(frozen=True)
class GroupRounding:
    """How rows of activations are rounded.

    Attributes:
        group: numbers that share a scale: 16, 32, 64 or 128; with 8 bits 64 or 128.
        factor: float32 ``[1]``, on the device: what scales of groups of 16 are multiplied by before they are
            rounded; ``None`` for other groups.
        packed: 0: values. Else rows are uint8: two codes a byte, the earlier one in the low half, then the
            scales' bytes (e4m3 or e8m0); columns are filled up to a multiple of this number. Rows begin at
            multiples of 16 bytes.
        bits: of a level, 4 or 8.
    """

    group: int
    factor: torch.Tensor | None = None
    packed: int = 0
    bits: int = 4

    def columns(self, k: int) -> int:
        """Numbers that a row of ``k`` has when it is filled up."""
        return -(-k // self.packed) * self.packed if self.packed else k

    def width(self, k: int) -> int:
        """Numbers, or bytes, of a row of ``k`` that was rounded."""
        columns = self.columns(k)
        return -(-(columns // 2 + columns // self.group) // 16) * 16 if self.packed else k


@triton.jit
def _nearest(v: tl.tensor, TOP: tl.constexpr, NORMAL: tl.constexpr, MIDDLE: tl.constexpr) -> tl.tensor:
    """Numbers within ±TOP, rounded: 1.5 · 2^(e + MIDDLE) leaves few bits of a number with exponent e; below
    the smallest NORMAL number steps don't shrink."""
    v = tl.minimum(tl.maximum(v, -TOP), TOP)
    e = tl.maximum(v.to(tl.int32, bitcast=True) & 0x7F800000, NORMAL << 23) + (MIDDLE << 23)
    large = e.to(tl.float32, bitcast=True) * 1.5
    return (v + large) - large


@triton.jit
def to_group_levels(x: tl.tensor, factor: tl.tensor, FINE: tl.constexpr) -> tl.tensor:
    """Groups, float32 ``[groups, size]`` → levels likewise, and scales ``[groups]`` twice: float32, NaN for a
    group that isn't finite, and the byte that stores them, int32. ``FINE``: they are e4m3."""
    size = tl.abs(x)
    # a comparison that NaN and infinity fail; a maximum may leave NaN out
    finite = size <= LARGEST
    broken = tl.sum(finite.to(tl.int32) ^ 1, 1) > 0
    top = tl.max(tl.where(finite, size, 0.0), 1)
    if FINE:
        stored = _nearest(tl.div_rn(top, tl.full(top.shape, 6.0, tl.float32)) * factor, 448.0, 121, 20)
        stored = tl.where(stored == 0, 0.125, stored)
        scale = tl.div_rn(stored, tl.zeros(top.shape, tl.float32) + factor)
        # e4m3's bits are those of a float32 whose exponent is smaller by 120
        byte = tl.where(broken, 0x7F, (stored * 2.0**-120).to(tl.int32, bitcast=True) >> 20)
    else:
        exponent = ((top.to(tl.int32, bitcast=True) + (1 << 21)) >> 23) - 2
        exponent = tl.minimum(tl.maximum(exponent, 0), 254)
        # float32 has the same exponents, but for its smallest, which is a subnormal number
        stored = tl.maximum(exponent << 23, 1 << 22).to(tl.float32, bitcast=True)
        scale = stored
        byte = tl.where(broken, 0xFF, exponent)
    each = tl.zeros(x.shape, tl.float32) + scale[:, None]
    level = _nearest(tl.div_rn(tl.where(finite, x, 0.0), each), 6.0, 127, 22)
    return level, tl.where(broken, float("nan"), stored), byte


@triton.jit
def to_e4m3_groups(x: tl.tensor) -> tl.tensor:
    """The same with levels of e4m3 and float32 scales; no byte stores these."""
    size = tl.abs(x)
    finite = size <= LARGEST
    broken = tl.sum(finite.to(tl.int32) ^ 1, 1) > 0
    top = tl.maximum(tl.max(tl.where(finite, size, 0.0), 1), 2.0**-100)
    scale = tl.div_rn(top, tl.full(top.shape, 448.0, tl.float32))
    each = tl.zeros(x.shape, tl.float32) + scale[:, None]
    level = _nearest(tl.div_rn(tl.where(finite, x, 0.0), each), 448.0, 121, 20)
    return level, tl.where(broken, float("nan"), scale)


@triton.jit
def round_and_store(x: tl.tensor, group: tl.tensor, row: tl.tensor, f_ptr: tl.tensor, l_ptr: tl.tensor,
                    t_ptr: tl.tensor, first: tl.tensor, K: tl.constexpr, COLUMNS: tl.constexpr,
                    WIDTH: tl.constexpr, PACKED: tl.constexpr, LEVEL_BITS: tl.constexpr) -> None:
    """Round groups of a row, float32 ``[groups, size]``, 0 beyond its K numbers; ``group [groups]`` says
    which they are. With the ``first`` ones the row's number is stored. The rest: see
    :func:`round_groups_kernel`."""
    FINE: tl.constexpr = f_ptr is not None
    HALF: tl.constexpr = not FINE and not PACKED and LEVEL_BITS == 4 and l_ptr.dtype.element_ty.is_fp16()
    GROUPS: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = x.shape[1]
    number = 1.0
    if FINE:
        number = tl.load(f_ptr)
    if LEVEL_BITS == 8:
        level, stored = to_e4m3_groups(x)
        byte = stored.to(tl.int32)  # of packed rows, which these aren't
    else:
        level, stored, byte = to_group_levels(x, number, FINE)
    here = l_ptr + row * WIDTH
    if PACKED:
        # a level's upper bits count from 0.5, which has no neighbor with a mantissa of 1
        upper = (tl.abs(level).to(tl.int32, bitcast=True) >> 22) - 252
        code = tl.maximum(upper, 0) + (upper == 0).to(tl.int32) + ((level < 0).to(tl.int32) << 3)
        low, high = tl.split(code.reshape(GROUPS, SIZE // 2, 2))
        pair = group[:, None] * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
        tl.store(here + pair, (low | (high << 4)).to(tl.uint8), mask=pair < COLUMNS // 2)
        tl.store(here + COLUMNS // 2 + group, byte.to(tl.uint8), mask=group < COLUMNS // SIZE)
    else:
        value = level * (stored * 0.5 if HALF else stored)[:, None]
        col = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        tl.store(here + col, value.to(l_ptr.dtype.element_ty), mask=col < K)
    if first:
        tl.store(t_ptr + row, tl.div_rn(1.0, number) if FINE else 2.0 if HALF else 1.0)


@triton.jit
def round_groups_kernel(x_ptr: tl.tensor, f_ptr: tl.tensor, l_ptr: tl.tensor, t_ptr: tl.tensor,
                        x_row: tl.tensor, K: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
                        GROUP: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr,
                        LEVEL_BITS: tl.constexpr, EARLY: tl.constexpr) -> None:
    """BLOCK numbers of a row: x ``[m, K]``, rows x_row apart; f one number, or ``None``; rounded rows l
    ``[m, WIDTH]``, see :class:`GroupRounding`; t float32 ``[m]``. Rows are filled up to COLUMNS."""
    if EARLY:
        let_next_begin()
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    col = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + row * x_row + col, mask=col < K, other=0.0).to(tl.float32)
    round_and_store(x, group, row, f_ptr, l_ptr, t_ptr, tl.program_id(1) == 0, K, COLUMNS, WIDTH, PACKED,
                    LEVEL_BITS)


def constants(k: int, how: GroupRounding, early: bool) -> dict[str, int | bool]:
    """Compile-time arguments and options for rows of k numbers; ``early``: see
    :func:`~quantkit_kernels.triton.dependent.starts`."""
    columns = how.columns(k)
    block = min(BLOCK, max(how.group, triton.next_power_of_2(columns)))
    return {"K": k, "COLUMNS": columns, "WIDTH": how.width(k), "GROUP": how.group, "BLOCK": block,
            "PACKED": how.packed > 0, "LEVEL_BITS": how.bits, "EARLY": early,
            "num_warps": max(1, block // 512)}


def empty_groups(x: torch.Tensor, how: GroupRounding) -> QuantizedActivations:
    """Unwritten rows for activations ``[m, k]``.

    Raises:
        ValueError: another shape, or groups of 16 without a number, or others with one.
    """
    if x.ndim != 2 or (how.factor is not None) != (how.group == FINE):
        raise ValueError(f"rows must be [m, k], and groups of {FINE} have a factor, others none, not "
                         f"{list(x.shape)} in groups of {how.group}")
    m, k = x.shape
    values = torch.empty(m, how.width(k), dtype=torch.uint8 if how.packed else x.dtype, device=x.device)
    return QuantizedActivations(values, torch.empty(m, dtype=torch.float32, device=x.device), x.dtype)


def round_groups(x: torch.Tensor, how: GroupRounding) -> QuantizedActivations:
    """Rows ``[m, k]``, bfloat16, float16 or float32, rounded.

    Raises:
        ValueError: another shape than ``[m, k]``, or groups of 16 without a number, or others with one.
    """
    result = empty_groups(x, how)
    if x.shape[0]:
        x = x if x.stride(1) == 1 else x.contiguous()
        options = constants(x.shape[1], how, starts(x.device))
        round_groups_kernel[(x.shape[0], -(-options["COLUMNS"] // options["BLOCK"]))](
            x, how.factor, result.values, result.scale, x.stride(0), **options)
    return result
