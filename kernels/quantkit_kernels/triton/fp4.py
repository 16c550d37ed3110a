"""4-bit floating-point weights (e2m1) and 16-bit activations: ``y = x Wᵀ``, ``w = level · scale``.

Levels are 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with both signs: https://arxiv.org/abs/2310.10537. If a code's three
bits are moved to the lowest exponent bits and the highest mantissa bit of a half-precision number, that is
the level divided by a power of 2, also for 0.5, which becomes a subnormal number.

In groups of 32 or more (MXFP4) the scale, a power of 2, multiplies the float32 sum of a group. In groups of
16 (NVFP4) scales are e4m3: level and scale have six significant bits together, so that their product, which
the tensor core gets, is exact in bfloat16 and in float16. A float32 number of the tensor's multiplies the
sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quantkit_kernels.triton.fragment import (
    family_of,
    lane_columns,
    nibbles,
    pairs,
    place,
    shuffle,
    tile,
    whole_tiles,
)
from quantkit_kernels.triton.group_scales import fine_scales, pack_scales
from quantkit_kernels.triton.packed import TritonDecoder, TritonWeight

GROUPS = (32, 64, 128)
"""Group sizes whose scale multiplies a sum; multiples of 128 work too."""
# signed, or Triton would compute in 64 bits
SIGN = tl.constexpr(0x80008000 - 2**32)


@triton.jit
def _levels(w: tl.tensor, D: tl.constexpr) -> tl.tensor:
    """Words → levels, D ``[words, c, e, h]``."""
    FACTOR: tl.constexpr = 2.0**14 if D.is_fp16() else 2.0**126
    if D.is_fp32():
        q = nibbles(w, False)
        v = (((q & 8) << 28) | ((q & 7) << 22)).to(tl.float32, bitcast=True)
    elif D.is_fp16():
        v = pairs(((w << 12) & SIGN) | ((w << 9) & 0x0E000E00), ((w << 8) & SIGN) | ((w << 5) & 0x0E000E00),
                  ((w << 4) & SIGN) | ((w << 1) & 0x0E000E00), (w & SIGN) | ((w >> 3) & 0x0E000E00), D)
    else:
        v = pairs(((w << 12) & SIGN) | ((w << 6) & 0x01C001C0), ((w << 8) & SIGN) | ((w << 2) & 0x01C001C0),
                  ((w << 4) & SIGN) | ((w >> 2) & 0x01C001C0), (w & SIGN) | ((w >> 6) & 0x01C001C0), D)
    return v * FACTOR


@triton.jit
def decode_e2m1(w: tl.tensor, s: tl.tensor, magic: tl.tensor, D: tl.constexpr, K: tl.constexpr,
                MODE: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Words of a tile → nothing, and levels, D ``[128, K]``."""
    SPAN: tl.constexpr = 64 if K >= 64 else 32
    return s, tile(_levels(w, D), K, SPAN, 64 // SPAN, WIDE)


@triton.jit
def _scale(b: tl.tensor, D: tl.constexpr) -> tl.tensor:
    """e4m3, never negative → D."""
    return ((b << 20).to(tl.float32, bitcast=True) * 2.0**120).to(D)


@triton.jit
def decode_e2m1_fine(w: tl.tensor, s: tl.tensor, magic: tl.tensor, D: tl.constexpr, K: tl.constexpr,
                     MODE: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Words of a tile and their scales, int16 ``[words]`` → nothing, and D ``[128, K]``."""
    b = s.to(tl.int32)
    scale = tl.join(_scale(b & 0xFF, D), _scale((b >> 8) & 0xFF, D))
    v = _levels(w, D) * scale.reshape(w.shape[0], 1, 1, 2)
    return s, tile(v, K, 64, 1, WIDE)


@triton.jit
def _level(tile_ptr: tl.tensor, word: tl.tensor, shift: tl.tensor) -> tl.tensor:
    q = tl.load(tile_ptr + word) >> shift
    return (((q & 8) << 28) | ((q & 7) << 22)).to(tl.float32, bitcast=True) * 2.0**126


@triton.jit
def number(tile_ptr: tl.tensor, s: tl.tensor, row: tl.tensor, col: tl.tensor, K: tl.constexpr,
           MODE: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Single levels of tiles, float32."""
    SPAN: tl.constexpr = 64 if K >= 64 else 32
    word, c, e, h = place(row, col, SPAN, 64 // SPAN, WIDE)
    return _level(tile_ptr, word, 16 * e + 4 * c + 8 * h)


@triton.jit
def fine_number(tile_ptr: tl.tensor, s: tl.tensor, row: tl.tensor, col: tl.tensor, K: tl.constexpr,
                MODE: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Single numbers of tiles, float32."""
    word, c, e, h = place(row, col, 64, 1, WIDE)
    scale = (((s.to(tl.int32) >> (8 * h)) & 0xFF) << 20).to(tl.float32, bitcast=True) * 2.0**120
    return _level(tile_ptr, word, 16 * e + 4 * c + 8 * h) * scale


E2M1 = TritonDecoder(decode_e2m1, number)
E2M1_FINE = TritonDecoder(decode_e2m1_fine, fine_number)


def pack(codes: torch.Tensor, scale: torch.Tensor, family: str | None = None,
         gated: bool = False) -> TritonWeight:
    """Repack weights in groups of 32 or more, such as MXFP4, once.

    Args:
        codes: uint8 ``[n, k]``, 0 to 15.
        scale: float32 ``[n, k / group]``, group 32, 64 or a multiple of 128.
        family: the GPUs' family; by default that of the tensors' device.
        gated: rows are a gate's, then as many of what it opens.

    Raises:
        ValueError: such groups don't exist.
    """
    n, k = codes.shape
    group = k // scale.shape[1]
    if k % scale.shape[1] or (group not in GROUPS and group % 128):
        raise ValueError(f"groups must be 32, 64 or a multiple of 128 columns, not {k} / {scale.shape[1]}")
    bk, family = min(group, 128), family or family_of(codes.device)
    words = shuffle(whole_tiles(codes, bk, gated), 4, bk, lane_columns(family))
    # a group of which all is 0 may have any scale
    empty = (codes & 7 == 0).view(n, scale.shape[1], -1).all(-1)
    scales, layout = pack_scales(torch.where(empty, 1.0, scale.float()), gated=gated, powers=True)
    return TritonWeight(words, scales, n, k, bk, group, layout, family, E2M1, gated, layout)


def pack_fine(codes: torch.Tensor, scale: torch.Tensor, outer: torch.Tensor, family: str | None = None,
              gated: bool = False) -> TritonWeight:
    """Repack weights in groups of 16 (NVFP4), once.

    Args:
        codes: uint8 ``[n, k]``, 0 to 15.
        scale: float8_e4m3fn ``[n, k / 16]``, none negative.
        outer: float32 ``[n]`` or one number: what scales are multiples of.
        family: the GPUs' family; by default that of the tensors' device.
        gated: rows are a gate's, then as many of what it opens.
    """
    n, k = codes.shape
    bk, family = 64, family or family_of(codes.device)
    words = shuffle(whole_tiles(codes, bk, gated), 4, bk, lane_columns(family))
    scales = fine_scales(scale.view(torch.uint8), outer.float().reshape(-1).expand(n), bk, 4, gated)
    return TritonWeight(words, scales, n, k, bk, 0, "e4m3", family, E2M1_FINE, gated, "fine")


