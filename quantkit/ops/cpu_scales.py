"""The scales of a weight's groups as our CPU kernels read them, in as few bytes as hold them exactly."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F

from quantkit.formats.base import Codes
from quantkit.ops.cpu_machine import isa

if TYPE_CHECKING:
    from quantkit_kernels.cpu.scales import ScaleLayout

HALVES: tuple[tuple[str, Literal["bf16", "f16"], torch.dtype], ...] = (
    ("bfloat16", "bf16", torch.bfloat16), ("float16", "f16", torch.float16))
_EXPONENT, _SMALLEST = 23, 1 << 22
"""Where float32 has its exponent; the bits of 2⁻¹²⁷, a subnormal number."""


@dataclass(frozen=True)
class PackedScales:
    """Scales in a kernel's order.

    Attributes:
        layout: how they are stored.
        scales, outer: as ``quantkit_kernels.cpu.scales`` says.
    """

    layout: ScaleLayout
    scales: torch.Tensor
    outer: torch.Tensor | None = None


def packed_scales(codes: Codes, columns: int, factor: float = 1.0) -> PackedScales:
    """Scales (and minima) of rows or groups, times ``factor``, a power of 2.

    Args:
        codes: a weight ``[n, k]``, of whose scales there is one for the tensor, a row or a group.
        columns: k, padded to whole groups of the kernel.
        factor: multiplies scales alone.
    """
    rows, k = codes.codes.shape
    scale = codes.scale.expand(rows, -1) * factor
    missing = columns * scale.shape[1] // k - scale.shape[1] if codes.spec.granularity.size else 0
    parts = [scale] if codes.minimum is None else [scale, codes.minimum]
    small = _multiples(codes, parts, factor)
    if small is None:
        small = _powers(codes, scale) or _floats(codes, parts)
    return _laid(small, missing)


def tile_scales(scale: torch.Tensor, rows: int, columns: int, size: int) -> PackedScales:
    """The scales of tiles ``[⌈rows / size⌉, ⌈columns / size⌉]``, of which a block of rows has one."""
    from quantkit_kernels.cpu.scales import ScaleLayout
    from quantkit_kernels.cpu.weight_decoder import STRIPE

    first = torch.arange(0, rows + -rows % STRIPE, isa().lanes)
    blocks = F.pad(scale, (0, columns // size - scale.shape[1]))[(first // size).clamp(max=len(scale) - 1)]
    return PackedScales(ScaleLayout("f32", shared=True), blocks.contiguous())


def _laid(stored: _StoredScales, missing: int) -> PackedScales:
    """Scales in a kernel's order, padded by ``missing`` groups."""
    from quantkit_kernels.cpu import pack

    padded = [F.pad(part, (0, missing)) for part in stored.numbers]
    return PackedScales(stored.layout, pack.scales(padded, isa().lanes),
                        pack.scales(stored.outer, isa().lanes) if stored.outer else None)


@dataclass(frozen=True)
class _StoredScales:
    """Numbers ``[n, groups]`` each in a layout, and what those are multiples of."""

    layout: ScaleLayout
    numbers: list[torch.Tensor]
    outer: list[torch.Tensor] = field(default_factory=list)


def _multiples(codes: Codes, parts: list[torch.Tensor], factor: float) -> _StoredScales | None:
    """Scales as small numbers that multiply those of superblocks or of the tensor; ``None`` if they aren't
    exactly that."""
    from quantkit_kernels.cpu.scales import ScaleLayout
    from quantkit_kernels.cpu.weight_decoder import SUB

    spec, rows = codes.spec, len(parts[0])
    if codes.outer is None or (spec.superblock or 0) % SUB:
        return None
    outers = [codes.outer * factor] + ([] if codes.outer_minimum is None else [-codes.outer_minimum])
    outers = [outer.expand(rows, -1).contiguous() for outer in outers]
    numbers = []
    for part, outer in zip(parts, outers, strict=True):
        wide = outer.repeat_interleave(part.shape[1] // outer.shape[1], dim=1)
        exact = torch.where(wide == 0, 0.0, part / wide)
        if spec.superblock is None:
            number = exact.to(torch.float8_e4m3fn)
        else:
            least, dtype = (0, torch.uint8) if spec.minimum else (-128, torch.int8)
            number = exact.round().clamp(least, least + 255).to(dtype)
        if not torch.equal(number.float() * wide, part):
            return None
        numbers.append(number.view(torch.uint8))
    halves = [outer.to(torch.float16) for outer in outers]
    short = all(torch.equal(half.float(), outer) for half, outer in zip(halves, outers))
    layout = ScaleLayout("e4m3" if spec.superblock is None else "u8" if spec.minimum else "i8", spec.minimum,
                         spec.superblock or 0, "f16" if short else "f32")
    return _StoredScales(layout, numbers, halves if short else outers)


def _powers(codes: Codes, scale: torch.Tensor) -> _StoredScales | None:
    """Powers of 2 as their exponents. A group of which all is 0 may have any scale."""
    from quantkit_kernels.cpu.scales import ScaleLayout

    if codes.spec.scale_dtype != "e8m0":
        return None
    empty = (codes.codes & 7 == 0).view(len(scale), scale.shape[1], -1).all(-1)
    scale = torch.where(empty, 1.0, scale)
    exponents = scale.view(torch.int32) >> _EXPONENT
    exact = (exponents << _EXPONENT).clamp(min=_SMALLEST).view(torch.float32)
    if not torch.equal(exact, scale):
        return None
    return _StoredScales(ScaleLayout("e8m0"), [exponents.to(torch.uint8)])


def _floats(codes: Codes, parts: list[torch.Tensor]) -> _StoredScales:
    """Numbers in the 16 bits that the spec says, if nothing is lost by it, else in 32."""
    from quantkit_kernels.cpu.scales import ScaleLayout

    for name, stored, dtype in HALVES:
        halves = [part.to(dtype) for part in parts]
        if codes.spec.scale_dtype == name and all(
                torch.equal(half.float(), part) for half, part in zip(halves, parts)):
            return _StoredScales(ScaleLayout(stored, len(parts) == 2), halves)
    return _StoredScales(ScaleLayout("f32", len(parts) == 2), [part.float() for part in parts])
