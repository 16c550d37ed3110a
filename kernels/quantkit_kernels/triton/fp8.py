"""8-bit floating-point weights (e4m3) with one scale per row and 16-bit activations: ``y = x Wᵀ``.

If a code's bits are moved to the lowest exponent bits and the highest mantissa bits of a half-precision
number, the result is the code's value divided by a power of two, also for subnormal values. One packed
multiplication undoes the division exactly, so levels are exact on every target.
https://arxiv.org/abs/2209.05433

Two of the four codes in a word are already where bfloat16 needs them. The other two fill the gaps: exponents
and mantissas are four bits off on either side, and signs are where a rotation by four bits moves them to the
right place. A 16-bit half is ``S eeee EEEE MMM s' mmm``: ``E`` is an exponent bit, ``M`` a mantissa bit,
``S`` the sign; upper case is the half's first code, lower case its second, and s' is the sign of the second
code of the other half.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quantkit_kernels.triton.fragment import (
    family_of,
    halves,
    lane_columns,
    place,
    rows,
    shuffle,
    tile,
    whole_tiles,
)
from quantkit_kernels.triton.packed import TritonDecoder, TritonWeight
from quantkit_kernels.triton.token_groups import GroupRounding

BK = 64
"""Columns of a tile."""
# signed, or Triton would compute in 64 bits
SIGN = tl.constexpr(0x80008000 - 2**32)
FIRST = tl.constexpr(0x87F087F0 - 2**32)
SECOND = tl.constexpr(0x87808780 - 2**32)


@triton.jit
def _rotated(w: tl.tensor) -> tl.tensor:
    """Rotate right by four bits."""
    return ((w >> 4) & 0x0FFFFFFF) | (w << 28)


@triton.jit
def e4m3_pairs(w: tl.tensor, D: tl.constexpr) -> tl.tensor:
    """Decode words exactly to D: the first codes of both halves, then the second codes of both halves."""
    first = w & FIRST
    second = (_rotated(w) & SECOND) | ((w << 4) & 0x00700070)
    if D.is_fp16():
        # float16's mantissa is three bits longer; the result is 2^8 too small
        first = (first & SIGN) | ((first << 3) & 0x3F803F80)
        second = (second & SIGN) | ((second << 3) & 0x3F803F80)
        a, b = halves(first, D)
        c, d = halves(second, D)
        a, b, c, d = a * 256.0, b * 256.0, c * 256.0, d * 256.0
    elif D.is_fp32():
        a, b, c, d = _wide(first << 16), _wide(first), _wide(second << 16), _wide(second)
    else:
        a, b = halves(first, D)
        c, d = halves(second, D)
        a, b, c, d = a * 2.0**120, b * 2.0**120, c * 2.0**120, d * 2.0**120
    return a, b, c, d


@triton.jit
def _wide(t: tl.tensor) -> tl.tensor:
    """Return the bfloat16 in the upper half of a word, times 2^120."""
    return (t & -65536).to(tl.float32, bitcast=True) * 2.0**120


@triton.jit
def decode_e4m3(w: tl.tensor, s: tl.tensor, magic: tl.tensor, D: tl.constexpr, K: tl.constexpr,
                MODE: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Decode the words of a tile to D ``[128, K]``; the scales are returned as they are."""
    a, b, c, d = e4m3_pairs(w, D)
    return s, tile(tl.join(tl.join(a, b), tl.join(c, d)), K, 32, 1, WIDE)


@triton.jit
def number(tile_ptr: tl.tensor, s: tl.tensor, row: tl.tensor, col: tl.tensor, K: tl.constexpr,
           MODE: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Decode single numbers of tiles to float32."""
    word, c, e, h = place(row, col, 32, 1, WIDE)
    a0, a1, b0, b1 = e4m3_pairs(tl.load(tile_ptr + word * 2 + c), tl.float32)
    return tl.where(h == 0, tl.where(e == 0, a0, a1), tl.where(e == 0, b0, b1)) * s


E4M3 = TritonDecoder(decode_e4m3, number)


def pack(codes: torch.Tensor, scale: torch.Tensor, family: str | None = None, gated: bool = False,
         decoder: TritonDecoder = E4M3, group: int = 0, inputs: GroupRounding | None = None) -> TritonWeight:
    """Pack a weight for the kernels. This is done once, when a model is loaded.

    Args:
        codes: uint8 or float8_e4m3fn ``[n, k]``, none of them NaN.
        scale: float ``[n]``, or ``[n, k / group]`` (the last group may be shorter), group a multiple of 64.
        family: family of GPUs; by default that of the tensors' device.
        gated: the first half of the rows are a gate projection's, the second half an up projection's.
        decoder: determines which activations the weight takes.
        group: columns that share a scale; 0: a row.
        inputs: how rows of x are rounded before.
    """
    n, k = codes.shape
    family = family or family_of(codes.device)
    padded = whole_tiles(codes.view(torch.uint8), BK, gated)
    words = shuffle(padded, 8, BK, lane_columns(family))
    for tiles in words:  # a few at a time: intermediate results take four times their memory
        tiles.copy_(spread(tiles))
    scales = rows(scale.float(), gated)
    return TritonWeight(words, scales.T.contiguous() if group else scales, n, k, BK, group, "row", family,
                        decoder, gated, inputs=inputs)


def spread(words: torch.Tensor) -> torch.Tensor:
    """Arrange the bits for the decoder: bytes 0 and 2 become the halves' first codes, 1 and 3 the second."""
    sign, rest = (words & 0x0080) << 8 | (words & 0x00800000) << 8, (words & 0x007F007F) << 4
    other = words >> 8 & 0x00FF00FF
    swapped = (other >> 16 & 0xFF) | (other & 0xFF) << 16
    return (sign | rest | (other & 0x00780078) << 8 | (other & 0x00070007) | (swapped & 0x00800080) >> 4)
