"""Weights in groups as Triton's kernels read them: minima, superblocks, groups of 16, tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quantkit.formats.base import Codes
from quantkit.formats.level_values import middle
from quantkit.ops.dispatch import KernelQuery

if TYPE_CHECKING:
    from quantkit_kernels.triton.packed import TritonWeight

FINE = 16
"""Columns that share a scale which multiplies weights instead of their sum."""
SUPERBLOCK = 256


def group_declines(query: KernelQuery) -> str | None:
    """Groups that Triton's kernels don't take."""
    spec = query.spec
    strategy, size = spec.granularity.strategy, spec.granularity.size or 0
    if strategy != "group":
        return None
    if size not in (FINE, 32, 64) and size % 128:
        return f"takes groups of 16, 32, 64 or a multiple of 128, not {spec.granularity}"
    if query.k % (spec.superblock or size):
        return f"needs in_features divisible by {spec.superblock or size}, not {query.k}"
    if size == FINE and not spec.symmetric:
        return "takes groups of 16 without zero points or minima"
    return None


def scales_of(codes: Codes, gated: bool) -> tuple[torch.Tensor, str]:
    """Scales and minima in a layout of :mod:`quantkit_kernels.triton.group_scales`; zero points are minima
    there."""
    from quantkit_kernels.triton.group_scales import pack_scales, pack_superblocks

    minimum = codes.minimum
    if codes.zero is not None:
        minimum = -codes.zero.float() * codes.scale
    small = _multiples(codes)
    return pack_superblocks(*small, gated=gated) if small is not None else pack_scales(
        codes.scale, minimum, gated=gated)


def _multiples(codes: Codes) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
    """Scales and minima as small multiples of float16 numbers; ``None`` if they aren't exactly that."""
    spec = codes.spec
    if spec.superblock != SUPERBLOCK or spec.granularity.size != 32 or codes.minimum is None:
        return None
    assert codes.outer is not None and codes.outer_minimum is not None
    halves = [codes.outer.half(), -codes.outer_minimum.half()]
    counts = []
    for part, half in zip((codes.scale, codes.minimum), halves):
        wide = half.float().repeat_interleave(SUPERBLOCK // 32, dim=1)
        count = torch.where(wide == 0, 0.0, part / wide).round().clamp(0, 255)
        if not torch.equal(count * wide, part):
            return None
        counts.append(count)
    return counts, halves


def pack_int4(codes: Codes, gated: bool) -> TritonWeight:
    """Up to 4 bits, in groups with minima, or of 16."""
    from quantkit_kernels.triton import w4a16

    size = codes.spec.granularity.size or 0
    if size == FINE:
        return w4a16.pack_fine(codes.codes + (8 - middle(codes.spec)), codes.scale, gated=gated)
    return w4a16.pack_minima(codes.codes, scales_of(codes, gated), size, gated=gated)


def pack_int8(codes: Codes, gated: bool) -> TritonWeight:
    """5 to 8 bits in groups."""
    from quantkit_kernels.triton import w8a16

    spec, size = codes.spec, codes.spec.granularity.size or 0
    if spec.symmetric:
        signed = (codes.codes.to(torch.int16) - middle(spec)).to(torch.int8)
        if size == FINE:
            return w8a16.pack_fine(signed, codes.scale, gated=gated)
        return w8a16.pack_groups(signed, scales_of(codes, gated), size, gated=gated)
    wide = spec.bits == 8
    signed = (codes.codes ^ (128 if wide else 0)).view(torch.int8)
    return w8a16.pack_groups(signed, scales_of(codes, gated), size, gated=gated, unsigned=wide)


def tile_rows(codes: Codes) -> torch.Tensor:
    """A tile's scale for each of its rows, ``[n, tiles of a row]``; they may be given like that already."""
    rows = codes.codes.shape[0]
    if codes.scale.shape[0] == rows:
        return codes.scale
    return codes.scale.repeat_interleave(codes.spec.granularity.size or 1, dim=0)[:rows]
