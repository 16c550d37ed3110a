"""Matrix products on the CPU by kernels of our own, straight from packed codes."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F

from quantkit.formats.base import Codes, QuantizedTensor
from quantkit.formats.level_values import codebook, level_table
from quantkit.formats.spec import Kind
from quantkit.formats.trellis_code import COMPUTED, HIGH, LEARNED, LOW, MIDDLE, learned
from quantkit.ops import gpu
from quantkit.ops.cpu_machine import isa, reason_against_kernels
from quantkit.ops.cpu_weight import CpuWeight, multiply, padded
from quantkit.ops.dispatch import KernelQuery, codes_of

if TYPE_CHECKING:
    from quantkit_kernels.cpu.scales import ScaleLayout
    from quantkit_kernels.cpu.weight_decoder import WeightDecoder


HALF = (torch.bfloat16, torch.float16)
"""Activations whose own rounding is about as coarse as that to the integers of a group of 32."""


class CpuKernel(ABC):
    """What the kernels have in common."""

    name = ""
    order = 40

    def reason_against(self, query: KernelQuery) -> str | None:
        """Anything but the weights that it has a decoder for, on a CPU."""
        if query.op != "linear":
            return f"implements linear, not {query.op}"
        if query.device != "cpu":
            return f"runs on cpu, not {query.device}"
        if query.dtype not in HALF:
            return f"takes bfloat16 or float16 activations, not {str(query.dtype).removeprefix('torch.')}"
        if gpu.SIMULATE and gpu.reason_against(query.device, query.dtype) is None:
            return "leaves it to the GPU's kernels, which are simulated"
        return reason_against_kernels() or self._reason_against(query)

    @abstractmethod
    def _reason_against(self, query: KernelQuery) -> str | None:
        """Why not these weights."""

    def prepare(self, weight: QuantizedTensor) -> CpuWeight:
        """Codes in the kernel's order."""
        packed = self._pack(codes_of(weight), weight)
        return dataclasses.replace(packed, rotated=weight.spec.rotation is not None)

    @abstractmethod
    def _pack(self, codes: Codes, weight: QuantizedTensor) -> CpuWeight:
        """Its codes, reordered."""

    def run(self, x: torch.Tensor, prepared: CpuWeight) -> torch.Tensor:
        """``x [m, k]`` → ``[m, n]`` in x's dtype."""
        return multiply(x, prepared)


class CpuInt8(CpuKernel):
    """Integers of 5 to 8 bits, with or without zero points or minima, activations as 14-bit integers with a
    scale for each 32."""

    name = "cpu-int8"

    def _reason_against(self, query: KernelQuery) -> str | None:
        spec = query.spec
        if spec.kind != "int" or spec.bits not in (5, 6, 7, 8):
            return f"multiplies integers of 5 to 8 bits, not {spec.kind}{spec.bits}"
        if spec.activations:
            return "leaves activations as they are"
        return reason_against_group(query)

    def _pack(self, codes: Codes, weight: QuantizedTensor) -> CpuWeight:
        from quantkit_kernels.cpu import decoders, pack

        if codes.spec.bits in (5, 6):
            return self._narrow(codes, weight)
        middle = 2 ** (codes.spec.bits - 1)
        zero = None
        decoder = decoders.INT8
        if codes.zero is not None:
            zero = (codes.zero.to(torch.int16) - middle).to(torch.int8).view(torch.uint8)
        elif codes.spec.minimum and codes.spec.bits == 8:
            decoder = decoders.UINT8
        elif codes.spec.minimum:
            middle = 0  # these codes are int8 as they are
        return grouped(self.name, codes, weight, decoder,
                       lambda lanes, multiple: pack.int8(codes.codes, lanes, multiple, middle), zero=zero)


    def _narrow(self, codes: Codes, weight: QuantizedTensor) -> CpuWeight:
        """5 and 6 bits, which take no more than that."""
        from quantkit_kernels.cpu import decoders, pack

        bits = codes.spec.bits
        pair = (decoders.INT5, decoders.UINT5) if bits == 5 else (decoders.INT6, decoders.UINT6)
        return grouped(self.name, codes, weight, pair[codes.spec.minimum],
                       lambda lanes, multiple: pack.wide_integers(codes.codes, lanes, bits, multiple),
                       zero=codes.zero)


class CpuInt4(CpuKernel):
    """Integers of 2 to 4 bits, with or without zero points or minima, activations as int8 with a scale for
    each 32."""

    name = "cpu-int4"

    def _reason_against(self, query: KernelQuery) -> str | None:
        spec = query.spec
        if spec.kind != "int" or spec.bits > 4:
            return f"multiplies integers of at most 4 bits, not {spec.kind}{spec.bits}"
        return reason_against_group(query)

    def _pack(self, codes: Codes, weight: QuantizedTensor) -> CpuWeight:
        from quantkit_kernels.cpu import decoders, pack

        bits, level = codes.spec.bits, codes.codes
        pair = {2: (decoders.INT2, decoders.UINT2), 3: (decoders.INT3, decoders.UINT3),
                4: (decoders.INT4, decoders.UINT4)}[bits]

        def packed(lanes: int, multiple: int) -> torch.Tensor:
            if bits == 4:
                return pack.int4(level, lanes, multiple)
            return pack.narrow_integers(level, lanes, bits, multiple)

        return grouped(self.name, codes, weight, pair[codes.spec.minimum], packed, zero=codes.zero)


class CpuNF4(CpuKernel):
    """NF4 in blocks that don't cross rows, activations as 14-bit integers with a scale for each 32."""

    name = "cpu-nf4"

    def _reason_against(self, query: KernelQuery) -> str | None:
        if query.spec.kind != "nf":
            return f"multiplies nf, not {query.spec.kind}"
        size = query.spec.granularity.size or 0
        if query.k % size:
            return f"needs in_features divisible by the block of {size}, not {query.k}"
        return reason_against_group(query)

    def _pack(self, codes: Codes, weight: QuantizedTensor) -> CpuWeight:
        from quantkit_kernels.cpu import decoders, matmul, pack
        from quantkit_kernels.cpu.weight_decoder import SUB

        group = codes.spec.granularity.size or 0
        table = tuple(codebook().tolist())
        columns = padded(weight.shape[1], max(group, SUB))
        scale = codes.scale.reshape(weight.shape[0], -1) / decoders.NF4_LEVELS
        scale = torch.nn.functional.pad(scale, (0, columns // group - scale.shape[1]))
        return CpuWeight(self.name, matmul.Matmul(decoders.nf4(table), group), weight.shape, columns,
                         pack.nf4(codes.codes, isa().lanes, group), pack.scales(scale, isa().lanes))


class CpuTrellis(CpuKernel):
    """A trellis, activations as integers with a scale for each 32: int8 with a learned table, else of 14
    bits."""

    name = "cpu-trellis"

    def _reason_against(self, query: KernelQuery) -> str | None:
        return None if query.spec.kind == "trellis" else f"multiplies a trellis, not {query.spec.kind}"

    def _pack(self, codes: Codes, weight: QuantizedTensor) -> CpuWeight:
        from quantkit_kernels.cpu import decoders, pack

        spec = codes.spec
        assert spec.window is not None
        if spec.window == LEARNED:
            return grouped(self.name, codes, weight, decoders.learned_trellis(spec.bits, learned(spec.bits)),
                           lambda *_: pack.learned_trellis(codes.codes, spec.bits))
        decoder = decoders.trellis(spec.bits, spec.window, (LOW, HIGH, MIDDLE))
        return grouped(self.name, codes, weight, decoder, lambda *_: pack.trellis(codes.codes, spec.bits))


def fastest_window() -> int:
    """Bits of the window of a trellis that this machine decodes fastest: a table is slow on a CPU that looks
    16 entries up at a time and into 32 bytes at most; a GPU's kernels take nothing but a table."""
    machine = isa()
    return LEARNED if machine.lanes == 16 or machine.neon or torch.cuda.is_available() else COMPUTED


def reason_against_group(query: KernelQuery) -> str | None:
    """Groups that no kernel here takes."""
    from quantkit_kernels.cpu.weight_decoder import SUB

    granularity = query.spec.granularity
    size = granularity.size
    if size is not None and size % SUB and size != SUB // 2:
        return f"takes groups of {SUB // 2} or a multiple of {SUB}, not {granularity}"
    if granularity.strategy == "group" and query.k % (query.spec.superblock or size or 1):
        return f"needs in_features divisible by {query.spec.superblock or size}, not {query.k}"
    return None


def grouped(name: str, codes: Codes, weight: QuantizedTensor, decoder: WeightDecoder,
            packed: Callable[[int, int], torch.Tensor], *, zero: torch.Tensor | None = None,
            factor: float = 1.0) -> CpuWeight:
    """A weight with a scale a tensor, a row or a group.

    Args:
        codes: the weight before packing.
        weight: the weight as it is stored.
        decoder: the decoder of its kernel.
        packed: lanes and the multiple to which columns are padded → codes in the decoder's order.
        zero: zero points as the kernel wants them, shape of the scales.
        factor: a factor on the scales.
    """
    from quantkit_kernels.cpu import matmul, pack
    from quantkit_kernels.cpu.weight_decoder import SUB

    group, lanes = codes.spec.granularity.size or 0, isa().lanes
    columns = padded(weight.shape[1], max(group, SUB))
    scales = packed_scales(codes, columns, factor)
    zeros = None
    if zero is not None:
        wide = zero.expand(weight.shape[0], -1)
        missing = columns // group - wide.shape[1] if group else 0
        zeros = pack.scales(torch.nn.functional.pad(wide, (0, missing)), lanes)
    return CpuWeight(name, matmul.Matmul(decoder, group, scales.layout, zeros is not None), weight.shape,
                     columns, packed(lanes, max(group, SUB)), scales.scales, zeros, outer=scales.outer)


class CpuW8A8(CpuKernel):
    """int8 weights with a scale a row by int8 activations with a scale a token."""

    name = "cpu-w8a8"

    def _reason_against(self, query: KernelQuery) -> str | None:
        from quantkit_kernels.cpu.matmul import MOST_COLUMNS

        if query.spec.kind != "int" or query.spec.activations is None:
            return "multiplies int8 weights by int8 activations"
        if query.k > MOST_COLUMNS:
            return f"adds up to {MOST_COLUMNS} products in 32 bits, not {query.k}"
        return None

    def _pack(self, codes: Codes, weight: QuantizedTensor) -> CpuWeight:
        from quantkit_kernels.cpu import decoders, pack

        return grouped(self.name, codes, weight, decoders.W8A8,
                       lambda lanes, _: pack.w8a8(codes.codes, lanes))


class CpuFP8(CpuKernel):
    """e4m3 weights with a scale a row, or for each tile without rounding activations, by float32 activations
    or by e4m3 ones with a scale a token."""

    name = "cpu-fp8"

    def _reason_against(self, query: KernelQuery) -> str | None:
        from quantkit_kernels.cpu.weight_decoder import SUB

        spec = query.spec
        if spec.kind != "fp" or spec.bits != 8:
            return f"multiplies fp8, not {spec.kind}{spec.bits}"
        if spec.activations == "group":
            return "rounds activations with one scale a token, or not at all"
        if (spec.granularity.size or 0) % SUB:
            return f"takes tiles of a multiple of {SUB}, not {spec.granularity}"
        return None

    def _pack(self, codes: Codes, weight: QuantizedTensor) -> CpuWeight:
        from quantkit_kernels.cpu import decoders, matmul, pack

        size = codes.spec.granularity.size
        if size is None:
            decoder = decoders.E4M3_TOKENS if codes.spec.activations else decoders.E4M3
            return grouped(self.name, codes, weight, decoder,
                           lambda *_: pack.rows(codes.codes))
        columns = padded(weight.shape[1], size)
        scales = tile_scales(codes.scale, weight.shape[0], columns, size)
        return CpuWeight(self.name, matmul.Matmul(decoders.E4M3, size, scales.layout), weight.shape, columns,
                         pack.rows(codes.codes, multiple=size), scales.scales)


class CpuTable(CpuKernel):
    """A table whose levels are whole numbers, or halves of them, activations as int8 with a scale for each
    32.

    That is as exact as :class:`CpuInt4` is: every level is an int8 as it is, unlike
    those of NF4.

    Args:
        kind: the kind of the specs that have such a table.
    """

    def __init__(self, name: str, kind: Kind) -> None:
        self.name, self._kind = name, kind

    def _reason_against(self, query: KernelQuery) -> str | None:
        spec = query.spec
        if spec.kind != self._kind or spec.bits != 4:
            return f"multiplies {self._kind}4, not {spec.kind}{spec.bits}"
        if spec.activations:
            return "leaves activations as they are"
        return reason_against_group(query)

    def _pack(self, codes: Codes, weight: QuantizedTensor) -> CpuWeight:
        from quantkit_kernels.cpu import decoders, pack

        table = level_table(codes.spec)
        assert table is not None
        times = 1 if all(level.is_integer() for level in table) else 2
        decoder = decoders.int_table(tuple(int(level * times) for level in table))
        return grouped(self.name, codes, weight, decoder,
                       lambda lanes, multiple: pack.int4(codes.codes, lanes, multiple), factor=1 / times)


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
    """Scales (and minima) of rows or groups, times ``factor``, a power of 2, in as few bytes as hold them
    exactly.

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


INT8 = CpuInt8()
INT4 = CpuInt4()
NF = CpuNF4()
TRELLIS = CpuTrellis()
INT, FP = CpuW8A8(), CpuFP8()
FP4, IQ4 = CpuTable("cpu-fp4", "fp"), CpuTable("cpu-iq4", "iq")
