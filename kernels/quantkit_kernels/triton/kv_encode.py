"""Stores vectors of keys and values in pages, unquantized or as codes, in the layout of ``cache.Side``.

All arithmetic is float32. Compiled without fused multiply-adds, the codes equal those of the same steps in
torch, bit for bit, except for Hadamard-rotated vectors, which depend on the order of sums.

- INT8, one scale per vector: https://arxiv.org/abs/2208.07339; FP8, e4m3: https://arxiv.org/abs/2209.05433.
- CHANNEL and TOKEN, a grid for 32 numbers: KIVI, https://arxiv.org/abs/2402.02750.
- HADAMARD, levels of a Gaussian for Hadamard-rotated vectors: TurboQuant, https://arxiv.org/abs/2504.19874.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quantkit_kernels.triton.cache import FP8, INT8, PLAIN, Side
from quantkit_kernels.triton.hadamard import finite, within

LEAST = tl.constexpr(0x00800000)  # the smallest normal bfloat16, as the bits of a float32
MOST = tl.constexpr(0x7F7F0000)  # the largest
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2 ** 23: adding it rounds to an integer, half to even
LARGEST = tl.constexpr(2.0**126)  # limit of what is stored as fp8 or on a grid: 15 steps are still finite
FARTHEST = tl.constexpr(2.0**60)  # limit of Hadamard-rotated vectors
SMALLEST = tl.constexpr(2.0**-60)


@triton.jit
def _above(x: tl.tensor) -> tl.tensor:
    """Round float32 up to the smallest bfloat16 that isn't below it."""
    bits = x.to(tl.int32, bitcast=True)
    return (tl.where(bits < 0, bits, bits + 0xFFFF) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _scale(maximum: tl.tensor, levels: tl.constexpr) -> tl.tensor:
    """Return ``maximum / levels``, rounded up to a normal finite bfloat16, so that its reciprocal is
    finite."""
    scale = tl.math.div_rn(maximum, tl.full(maximum.shape, levels, tl.float32))
    bits = (scale.to(tl.int32, bitcast=True) + 0xFFFF) & -65536
    return tl.minimum(tl.maximum(bits, LEAST), MOST).to(tl.float32, bitcast=True)


@triton.jit
def _over(x: tl.tensor) -> tl.tensor:
    """Return the reciprocal, rounded to nearest."""
    return tl.math.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def _nearest(x: tl.tensor) -> tl.tensor:
    """Round to the nearest integer, half to even; valid up to 2^22."""
    return (x + ROUND) - ROUND


@triton.jit
def _narrow(x: tl.tensor) -> tl.tensor:
    """Round float32 to the nearest bfloat16, half to even, and return its bits as int16."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)


@triton.jit
def _wide(bits: tl.tensor) -> tl.tensor:
    """Convert the bits of bfloat16 numbers, int16, to float32."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _int8(x: tl.tensor) -> tl.tensor:
    """Quantize ``[rows, n]`` to int8 codes and scales ``[rows]``."""
    scale = _scale(tl.max(tl.abs(x), 1), 127.0)
    codes = _nearest(x * _over(scale)[:, None])
    return within(codes, 127.0).to(tl.int8), scale


@triton.jit
def _fp8(x: tl.tensor) -> tl.tensor:
    """Quantize ``[rows, n]`` to int8 codes with the bits of e4m3 and scales ``[rows]``."""
    x = within(x, LARGEST)
    scale = _scale(tl.max(tl.abs(x), 1), 448.0)
    bits = within(x * _over(scale)[:, None], 448.0).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)  # another bias, 20 fewer bits
    denormal = _nearest(size.to(tl.float32, bitcast=True) * 512.0).to(tl.int32)  # multiples of 2^-9
    codes = tl.where(size < 0x3C800000, denormal, normal)  # below 2^-6
    return (codes | ((bits >> 24) & 0x80)).to(tl.int8), scale


@triton.jit
def _grid(x: tl.tensor, AXIS: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """Quantize a tile of three dimensions, AXIS of which shares a grid: ``x ≈ codes · scale + low``.

    The codes are int32.
    """
    LEVELS: tl.constexpr = 2**BITS - 1
    x = within(x, LARGEST)
    low = -_above(-tl.min(x, AXIS, keep_dims=True))
    scale = _scale(tl.max(x, AXIS, keep_dims=True) - low, LEVELS * 1.0)
    codes = _nearest((x - low) * _over(scale))
    return tl.minimum(tl.maximum(codes, 0.0), LEVELS * 1.0).to(tl.int32), scale, low


@triton.jit
def _levels(x: tl.tensor, D: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """Quantize ``[rows, n]`` to int32 codes of the nearest levels and the best scales for them,
    ``[rows]``."""
    # level c is u (a + b u²), u = c − (2^bits − 1) / 2
    A: tl.constexpr = 0.892891 if BITS == 2 else 0.471436 if BITS == 3 else 0.240464
    B: tl.constexpr = 0.0506915 if BITS == 2 else 0.0115850 if BITS == 3 else 0.00209768
    MIDDLE: tl.constexpr = (2**BITS - 1) / 2
    size = tl.math.sqrt_rn(tl.sum(x * x, 1) / D)
    normal = tl.math.div_rn(x, tl.broadcast_to(tl.maximum(size, SMALLEST)[:, None], x.shape))
    codes = tl.full(x.shape, 0, tl.int32)
    for c in tl.static_range(2**BITS - 1):
        u = c - MIDDLE
        between = (u * (A + B * u * u) + (u + 1) * (A + B * (u + 1) * (u + 1))) / 2
        codes += (normal > between).to(tl.int32)
    u = codes.to(tl.float32) - MIDDLE
    chosen = tl.where((tl.arange(0, x.shape[1]) < D)[None, :], u * (A + B * u * u), 0.0)
    return codes, tl.math.div_rn(tl.sum(x * chosen, 1), tl.sum(chosen * chosen, 1))


@triton.jit
def _pack(ptr: tl.tensor, codes: tl.tensor, word: tl.tensor, stored: tl.tensor, D: tl.constexpr,
          BITS: tl.constexpr) -> None:
    """Pack int32 codes ``[rows, n]`` of BITS bits, D of each row, into int32 words from ``word [rows]``
    on."""
    EACH: tl.constexpr = 32 // BITS
    ROWS: tl.constexpr = codes.shape[0]
    WORDS: tl.constexpr = codes.shape[1] // EACH
    rw = tl.arange(0, WORDS)
    places = (tl.arange(0, EACH) * BITS)[None, None, :]
    packed = tl.sum(codes.reshape(ROWS, WORDS, EACH) << places, 2)
    tl.store(ptr + word[:, None] + rw[None, :], packed, mask=stored[:, None] & (rw < D // EACH)[None, :])


@triton.jit
def _store_codes(ptr: tl.tensor, codes: tl.tensor, slot: tl.tensor, stored: tl.tensor, D: tl.constexpr,
                 BITS: tl.constexpr) -> None:
    """Store int32 codes ``[rows, n]`` of 2 to 4 bits in slots, int64 ``[rows]``."""
    word = slot * (D * BITS // 32)
    if BITS == 3:
        _pack(ptr, codes & 3, word, stored, D, 2)
        _pack(ptr, codes >> 2, word + D // 16, stored, D, 1)
    else:
        _pack(ptr, codes, word, stored, D, BITS)


@triton.jit
def _store_hadamard(x: tl.tensor, codes_ptr: tl.tensor, scale_ptr: tl.tensor, slot: tl.tensor,
                    stored: tl.tensor, D: tl.constexpr, BITS: tl.constexpr) -> None:
    """Quantize Hadamard-rotated vectors to levels and store codes and scales."""
    codes, scale = _levels(x, D, BITS)
    _store_codes(codes_ptr, codes, slot, stored, D, BITS)
    tl.store(scale_ptr + slot, _narrow(scale), mask=stored)


@triton.jit
def store_vectors(x: tl.tensor, codes_ptr: tl.tensor, scale_ptr: tl.tensor, shift_ptr: tl.tensor,
                  slot: tl.tensor, stored: tl.tensor, D: tl.constexpr, KIND: tl.constexpr,
                  BITS: tl.constexpr) -> None:
    """Encode and store each vector by itself, in any layout except CHANNEL and centered HADAMARD.

    x is float32 ``[rows, n]`` and 0 from D on; ``slot`` is int64 ``[rows]``, a page's number times 64 plus
    the place in it. Only rows with ``stored`` are written. For the pointers see :func:`pointers`.
    """
    ROWS: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    rd = tl.arange(0, N)
    cells = slot[:, None] * D + rd[None, :]
    mask = stored[:, None] & (rd < D)[None, :]
    if KIND == "plain":
        tl.store(codes_ptr + cells, finite(x, codes_ptr.dtype.element_ty), mask=mask)
    elif KIND == "token":
        codes, scale, low = _grid(x.reshape(ROWS, N // 32, 32), 2, BITS)
        _store_codes(codes_ptr, codes.reshape(ROWS, N), slot, stored, D, BITS)
        rg = tl.arange(0, N // 32)
        grids = slot[:, None] * (D // 32) + rg[None, :]
        mask = stored[:, None] & (rg < D // 32)[None, :]
        tl.store(scale_ptr + grids, _narrow(scale.reshape(ROWS, N // 32)), mask=mask)
        tl.store(shift_ptr + grids, _narrow(low.reshape(ROWS, N // 32)), mask=mask)
    elif KIND == "hadamard":
        _store_hadamard(within(x, FARTHEST), codes_ptr, scale_ptr, slot, stored, D, BITS)
    else:
        if KIND == "int8":
            codes, scale = _int8(x)
        else:
            codes, scale = _fp8(x)
        tl.store(codes_ptr + cells, codes, mask=mask)
        tl.store(scale_ptr + slot, _narrow(scale), mask=stored)


@triton.jit
def store_page(x: tl.tensor, codes_ptr: tl.tensor, scale_ptr: tl.tensor, shift_ptr: tl.tensor,
               page: tl.tensor, D: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr,
               CENTERED: tl.constexpr) -> None:
    """Encode and store all 64 vectors of a page, in any layout.

    x is float32 ``[64, n]`` and 0 from D on; ``page`` is int64.
    """
    N: tl.constexpr = x.shape[1]
    rd = tl.arange(0, N)
    slot = page * 64 + tl.arange(0, 64)
    stored = slot >= 0
    if KIND == "channel":
        codes, scale, low = _grid(x.reshape(2, 32, N), 1, BITS)
        _store_codes(codes_ptr, codes.reshape(64, N), slot, stored, D, BITS)
        grids = (page * 2 + tl.arange(0, 2))[:, None] * D + rd[None, :]
        mask = (tl.arange(0, 2) >= 0)[:, None] & (rd < D)[None, :]
        tl.store(scale_ptr + grids, _narrow(scale.reshape(2, N)), mask=mask)
        tl.store(shift_ptr + grids, _narrow(low.reshape(2, N)), mask=mask)
    elif CENTERED:
        x = within(x, FARTHEST)
        mean = _narrow(tl.sum(x, 0) * (1.0 / 64))
        tl.store(shift_ptr + page * D + rd, mean, mask=rd < D)
        _store_hadamard(x - _wide(mean)[None, :], codes_ptr, scale_ptr, slot, stored, D, BITS)
    else:
        store_vectors(x, codes_ptr, scale_ptr, shift_ptr, slot, stored, D, KIND, BITS)


def pointers(side: Side) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, scale and shift as kernels take them.

    Codes are plain numbers, int8, or int32 words; scale and shift are bfloat16 viewed as int16. Where a
    layout has no scale or shift, another of the three takes its place and is never accessed.
    """

    codes = side.codes
    if side.coding.kind == FP8:
        codes = codes.view(torch.int8)
    elif side.coding.kind not in (PLAIN, INT8):
        codes = codes.view(torch.int32)
    scale = codes if side.scale is None else side.scale.view(torch.int16)
    return codes, scale, scale if side.shift is None else side.shift.view(torch.int16)
