"""The scales of groups, and their minima: how they lie in 32-bit words, and how they become float32.

================  ================================================================================
layout            words of a row
================  ================================================================================
float32           a scale a group
bfloat16          two scales a word, those of neighboring groups, the first below; float16 likewise
e8m0              four powers of 2 a word, as their exponents plus 127
float32 low       a scale, then a minimum
bfloat16 low      a word a group: the scale below, the minimum above; float16 likewise
superblock        five words for eight groups: their multiples, a byte for a scale and one for a
                  minimum above it, two groups a word; then float16 numbers that both are multiples of
================  ================================================================================

Words of a row lie ``rows`` apart, as neighboring threads have neighboring rows.

Scales of 16 columns are too many to multiply sums by. They multiply weights, and lie in the order of the
words of weights: a word has 16 columns of two rows (or half of that, of 8-bit codes), and two scales.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from quantkit_kernels.triton.fragment import rows as padded_rows
from quantkit_kernels.triton.fragment import whole_tiles

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
MINIMA = ("float32 low", "bfloat16 low", "float16 low", "superblock")
"""Layouts with minima."""
SUPERBLOCK = 8
"""Groups of a superblock."""


FINE = 16
"""Columns that share one of the scales that multiply weights."""


@triton.jit
def fine_at(s_ptr: tl.tensor, tile: tl.tensor, word: tl.tensor, NPAD: tl.constexpr, WORDS: tl.constexpr,
            BITS: tl.constexpr, MODE: tl.constexpr) -> tl.tensor:
    """Two scales for words of a tile, as integers: behind the rows' float32 scales."""
    if MODE == "e4m3":
        fine_ptr = (s_ptr + NPAD).to(tl.pointer_type(tl.int16), bitcast=True)
    else:
        fine_ptr = (s_ptr + NPAD).to(tl.pointer_type(tl.int32), bitcast=True)
    # of a lane's four words 4-bit ones have 16 columns each, and two of 8 bits have them together
    place = word // 16 * 4 + word % 4 if BITS == 4 else word // 16 * 2 + word // 2 % 2
    return tl.load(fine_ptr + tile.to(tl.int64) * (WORDS // BITS) + place)


@triton.jit
def fine_half(s: tl.tensor, D: tl.constexpr) -> tl.tensor:
    """The two scales of words, float16 → D ``[words, 1, 1, 2]``."""
    low, high = _half(s, True), _half(s >> 16, True)
    return tl.join(low, high).to(D).reshape(s.shape[0], 1, 1, 2)


@triton.jit
def _half(word: tl.tensor, F16: tl.constexpr) -> tl.tensor:
    """The 16-bit float in the lower half of a word → float32."""
    if F16:
        number = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        number = (word << 16).to(tl.float32, bitcast=True)
    return number


@triton.jit
def scales_at(s_ptr: tl.tensor, group: tl.tensor, row: tl.tensor, NPAD: tl.constexpr,
              LAYOUT: tl.constexpr) -> tl.tensor:
    """Scales and minima, float32, of a group of rows or of groups and rows that go together; 0 where there
    are no minima."""
    g = tl.cast(group, tl.int64)  # the interpreter counts in Python's integers
    if LAYOUT == "float32":
        scale = tl.load(s_ptr + g * NPAD + row)
        low = scale * 0.0
    elif LAYOUT == "float32 low":
        scale = tl.load(s_ptr + g * (2 * NPAD) + row)
        low = tl.load(s_ptr + g * (2 * NPAD) + NPAD + row)
    elif LAYOUT == "e8m0":
        exponent = (tl.load(s_ptr + (g // 4) * NPAD + row) >> tl.cast(g % 4 * 8, tl.int32)) & 0xFF
        # float32 has the same exponents, but for its smallest, which is a subnormal number
        scale = tl.maximum(exponent << 23, 1 << 22).to(tl.float32, bitcast=True)
        low = scale * 0.0
    elif LAYOUT == "superblock":
        first = s_ptr + (g // 8) * (5 * NPAD) + row
        multiples = tl.load(first + (g % 8 // 2) * NPAD) >> tl.cast(g % 2 * 16, tl.int32)
        numbers = tl.load(first + 4 * NPAD)
        scale = (multiples & 0xFF).to(tl.float32) * _half(numbers, True)
        low = ((multiples >> 8) & 0xFF).to(tl.float32) * _half(numbers >> 16, True)
    elif LAYOUT == "bfloat16" or LAYOUT == "float16":
        scale = _half(tl.load(s_ptr + (g // 2) * NPAD + row) >> tl.cast(g % 2 * 16, tl.int32),
                      LAYOUT == "float16")
        low = scale * 0.0
    else:
        word = tl.load(s_ptr + g * NPAD + row)
        scale, low = _half(word, LAYOUT == "float16 low"), _half(word >> 16, LAYOUT == "float16 low")
    return scale, low


def pack_scales(scale: torch.Tensor, minimum: torch.Tensor | None = None, *, gated: bool = False,
                powers: bool = False) -> tuple[torch.Tensor, str]:
    """Scales in as few bytes as hold them exactly.

    Args:
        scale: float32 ``[n, groups]``.
        minimum: a tensor of the same shape.
        gated: rows are a gate's, then as many of what it opens.
        powers: scales are powers of 2.

    Returns:
        int32 or float32 ``[words, rows]``, and the layout's name.
    """
    if powers:
        bits = scale.contiguous().view(torch.int32)
        exponent = bits >> 23
        if torch.equal((exponent << 23).clamp(min=1 << 22), bits):
            return _words(exponent, 8, gated), "e8m0"
    for name, dtype in HALVES.items():
        parts = [scale] if minimum is None else [scale, minimum]
        halves = [part.to(dtype) for part in parts]
        if all(torch.equal(half.float(), part) for half, part in zip(halves, parts)):
            words = [half.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF for half in halves]
            if minimum is None:
                return _words(words[0], 16, gated), name
            return _laid(words[0] | words[1] << 16, gated), f"{name} low"
    if minimum is None:
        return _laid(scale, gated), "float32"
    return _laid(torch.stack((scale, minimum), dim=2).flatten(1), gated), "float32 low"


def pack_superblocks(multiples: Sequence[torch.Tensor], numbers: Sequence[torch.Tensor],
                     gated: bool = False) -> tuple[torch.Tensor, str]:
    """Scales and minima as multiples of their superblock's numbers.

    Args:
        multiples: those of scales and of minima are whole numbers up to 255 ``[n, groups]``.
        numbers: float16 ``[n, groups / 8]``.
        gated: rows are a gate's, then as many of what it opens.

    Returns:
        int32 ``[words, rows]``, and the layout's name.
    """
    first, second = (part.to(torch.int32) for part in multiples)
    pairs = (first | second << 8).unflatten(1, (-1, SUPERBLOCK // 2, 2))
    words = pairs[..., 0] | pairs[..., 1] << 16
    scale, minimum = (part.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF for part in numbers)
    words = torch.cat((words, (scale | minimum << 16).unsqueeze(2)), dim=2)
    return _laid(words.flatten(1), gated), "superblock"


def fine_scales(fine: torch.Tensor, row_scale: torch.Tensor, bk: int, bits: int,
                gated: bool = False) -> torch.Tensor:
    """Scales of rows, then of 16 columns each, as kernels read them.

    Args:
        fine: ``[n, k / 16]`` of 1 or 2 bytes.
        row_scale: the rows' numbers, float32 ``[n]``.
        bk: columns of a tile.
        bits: the bits of a code.
        gated: rows are a gate's, then as many of what it opens.

    Returns:
        float32: scales of rows; then pairs, a row's scale below that of the row eight further.
    """
    padded = whole_tiles(fine, bk // FINE, gated)
    columns = 4 if bits == 4 else 2  # of a load
    # dimensions: block, warp, h, g; tile, load, column
    parts = padded.reshape(len(padded) // 128, 2, 4, 2, 8, -1, bk // FINE // columns, columns)
    ordered = parts.permute(0, 5, 6, 1, 2, 4, 7, 3).contiguous()
    return torch.cat((padded_rows(row_scale.float(), gated), ordered.view(torch.uint8).flatten().view(
        torch.float32)))


def relative_halves(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 ``[n, k / 16]`` → the same as float16, over a power of 2 of each row, and these ``[n]``: so
    that neither scales nor weights leave float16's range."""
    largest = scale.abs().amax(1).clamp(min=2.0**-120)
    power = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)
    return (scale / power[:, None]).to(torch.float16), power


def _words(fields: torch.Tensor, bits: int, gated: bool) -> torch.Tensor:
    """int32 ``[n, groups]`` of few bits each → several a word."""
    count = 32 // bits
    fields = torch.nn.functional.pad(fields, (0, -fields.shape[1] % count)).unflatten(1, (-1, count))
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=fields.device)
    return _laid((fields << shifts).sum(2, dtype=torch.int32), gated)


def _laid(words: torch.Tensor, gated: bool) -> torch.Tensor:
    """``[n, words]`` → ``[words, rows]``."""
    return padded_rows(words, gated).T.contiguous()
