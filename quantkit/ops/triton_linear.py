"""Triton's matrix products for integers, fp8 and NF4, as kernels that the dispatch chooses from.

A weight is repacked once, from its codes; whatever format it is stored in. The kernels themselves are in
``quantkit_kernels.triton``; triton is imported when a weight is first prepared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from quantkit.formats.base import Codes, QuantizedTensor
from quantkit.formats.level_values import middle
from quantkit.formats.trellis_code import LEARNED, learned
from quantkit.ops import gpu
from quantkit.ops.dispatch import KernelQuery, codes_of

if TYPE_CHECKING:
    from quantkit_kernels.triton.packed import TritonWeight


NF4_BLOCK = 64


def _reason_against(query: KernelQuery, kind: str, bits: tuple[int, ...],
                    rounded: bool = False) -> str | None:
    """Reasons that hold for all of them; ``rounded``: activations are."""
    if query.op != "linear":
        return f"implements linear, not {query.op}"
    if (reason := gpu.reason_against(query.device, query.dtype)) is not None:
        return reason
    if query.device == "cuda" and query.dtype == torch.float32:
        return "takes 16-bit activations, not float32"
    if query.spec.kind != kind:
        return f"multiplies {kind}, not {query.spec.kind}"
    if query.spec.bits not in bits:
        return f"multiplies {'- and '.join(map(str, bits))}-bit weights, not {query.spec.bits}-bit"
    if bool(query.spec.activations) != rounded:
        return f"rounds activations to {bits[-1]} bits" if rounded else "leaves activations as they are"
    return None


def _reason_against_scales(query: KernelQuery) -> str | None:
    if not query.spec.symmetric:
        return "has no zero point"
    if query.spec.granularity.strategy not in ("channel", "tensor"):
        return f"takes one scale a row, not {query.spec.granularity}"
    return None


class TritonKernel(ABC):
    """What all of them share."""

    name: str
    order = 50

    @abstractmethod
    def reason_against(self, query: KernelQuery) -> str | None:
        """See :class:`~quantkit.ops.dispatch.LinearKernel`."""

    @abstractmethod
    def pack(self, codes: Codes, gated: bool = False) -> TritonWeight:
        """Codes in the tensor core's order; ``gated``: see
        :class:`quantkit_kernels.triton.packed.TritonWeight`."""

    def filled(self, k: int, device: torch.device) -> int:
        """Columns that a weight has on a device beside its own, where rows are filled up to whole tiles that
        are wider there."""
        return k

    def prepare(self, weight: QuantizedTensor) -> TritonWeight:
        """Codes in the tensor core's order."""
        return self.pack(codes_of(weight))

    def run(self, x: torch.Tensor, prepared: TritonWeight) -> torch.Tensor:
        """``x [m, k]`` → ``[m, n]`` in x's dtype."""
        from quantkit_kernels.triton.matmul import multiply

        return multiply(x, prepared)


class TritonW8A16(TritonKernel):
    """Integers of 8 bits with one scale a row, or of 5 to 8 in groups, with or without minima or zero
    points."""

    name = "triton-w8a16"

    def reason_against(self, query: KernelQuery) -> str | None:
        """Anything but 8-bit symmetric weights with one scale a row (or a tensor), or 5 to 8 bits in groups
        of 16, 32, 64 or a multiple of 128."""
        if query.spec.granularity.strategy == "group":
            return _reason_against(query, "int", (5, 6, 7, 8)) or _reason_against_groups(query)
        return _reason_against(query, "int", (8,)) or _reason_against_scales(query)

    def pack(self, codes: Codes, gated: bool = False) -> TritonWeight:
        from quantkit_kernels.triton.w8a16 import pack

        if codes.spec.granularity.strategy == "group":
            return pack_int8(codes, gated)
        return pack(_signed(codes), _by_row(codes), gated=gated)


class TritonFP8(TritonKernel):
    """e4m3 weights with one scale a row, or for each tile."""

    name = "triton-fp8"

    def reason_against(self, query: KernelQuery) -> str | None:
        """Anything but fp8 weights with one scale a row (or a tensor), or a tile of a multiple of 64; with
        activations that are rounded in groups only tiles of 64 or 128."""
        granularity = query.spec.granularity
        in_groups = query.spec.activations == "group"
        if granularity.strategy != "tile":
            return _reason_against(query, "fp", (8,)) or _reason_against_scales(query)
        if (granularity.size or 0) % 64 or (in_groups and (granularity.size or 0) > gpu.MAX_GROUP):
            return f"takes tiles of {'64 or 128' if in_groups else 'a multiple of 64'}, not {granularity}"
        return _reason_against(query, "fp", (8,), rounded=in_groups)

    def pack(self, codes: Codes, gated: bool = False) -> TritonWeight:
        """Their bits are where the decoder wants them."""
        from quantkit_kernels.triton.fp8 import pack
        from quantkit_kernels.triton.token_groups import GroupRounding

        if (size := codes.spec.granularity.size) is not None:
            inputs = GroupRounding(size, bits=8) if codes.spec.activations else None
            return pack(codes.codes, tile_rows(codes), gated=gated, group=size, inputs=inputs)
        return pack(codes.codes, _by_row(codes), gated=gated)

    def run(self, x: torch.Tensor, prepared: TritonWeight) -> torch.Tensor:
        """``x [m, k]`` → ``[m, n]`` in x's dtype."""
        from quantkit_kernels.triton.token_groups import round_groups

        how = prepared.inputs
        return super().run(x if how is None else round_groups(x, how).values, prepared)


class TritonW8A8(TritonKernel):
    """int8 or e4m3 weights with one scale a row, by activations of the same kind with one scale a token."""

    name = "triton-w8a8"

    def reason_against(self, query: KernelQuery) -> str | None:
        """Anything but 8 bits with one scale a row (or a tensor) and rounded activations."""
        kind = "fp" if query.spec.kind == "fp" else "int"
        reason = _reason_against(query, kind, (8,), rounded=True) or _reason_against_scales(query)
        if reason is not None:
            return reason
        return f"takes up to {gpu.MAX_ROW} columns, not {query.k}" if query.k > gpu.MAX_ROW else None

    def pack(self, codes: Codes, gated: bool = False) -> TritonWeight:
        from quantkit_kernels.triton.w8a8 import pack

        floats = codes.spec.kind == "fp"
        return pack(codes.codes.view(torch.float8_e4m3fn) if floats else _signed(codes), _by_row(codes),
                    gated=gated)

    def run(self, x: torch.Tensor, prepared: TritonWeight) -> torch.Tensor:
        """``x [m, k]`` → ``[m, n]`` in x's dtype."""
        from quantkit_kernels.triton.levels import quantize
        from quantkit_kernels.triton.matmul import multiply

        return multiply(quantize(x, prepared.decoder.takes[0]), prepared)


class TritonW4A16(TritonKernel):
    """Integers of up to 4 bits in groups, with or without zero points or minima."""

    name = "triton-w4a16"

    def reason_against(self, query: KernelQuery) -> str | None:
        """Anything but 2 to 4 bits in groups of 16, 32, 64 or a multiple of 128, or with a scale a row."""
        if (reason := _reason_against(query, "int", (2, 3, 4)) or _reason_against_groups(query)) is not None:
            return reason
        spec = query.spec
        if spec.minimum:
            return None
        wide = spec.scale_dtype == "float32" or (spec.scale_dtype == "model" and query.dtype == torch.float32)
        if not spec.symmetric and wide:
            return "keeps scales beside zero points in 16 bits, which would round float32 ones"
        return None

    def pack(self, codes: Codes, gated: bool = False) -> TritonWeight:
        """Fewer bits lie in four, symmetric ones around the same middle."""
        from quantkit_kernels.triton.w4a16 import pack

        scale, levels = codes.scale, codes.codes
        if codes.minimum is not None or codes.spec.granularity.size == FINE:
            return pack_int4(codes, gated)
        if scale.shape[0] == 1:
            scale = scale.expand(levels.shape[0], -1)
        if codes.zero is None:
            return pack(levels + (8 - 2**(codes.spec.bits - 1)), scale, gated=gated)
        return pack(levels, scale, codes.zero.expand_as(scale), gated=gated)


class TritonNF4(TritonKernel):
    """NF4 weights in blocks of 64 that don't cross rows; nested scales are unfolded once."""

    name = "triton-nf4"

    def reason_against(self, query: KernelQuery) -> str | None:
        """Anything but NF4 in blocks of 64, with rows of whole blocks."""
        if (reason := _reason_against(query, "nf", (4,))) is not None:
            return reason
        if query.spec.granularity.size != NF4_BLOCK:
            return f"takes blocks of {NF4_BLOCK}, not {query.spec.granularity}"
        if query.k % NF4_BLOCK:
            return f"needs in_features divisible by {NF4_BLOCK}, not {query.k}"
        return None

    def pack(self, codes: Codes, gated: bool = False) -> TritonWeight:
        from quantkit_kernels.triton.nf4 import pack

        return pack(codes.codes, codes.scale, gated=gated)


class TritonFP4(TritonKernel):
    """4-bit floats in groups: of 16 with e4m3 scales (NVFP4), of more with powers of 2 (MXFP4)."""

    name = "triton-fp4"

    def reason_against(self, query: KernelQuery) -> str | None:
        """Anything but e2m1 weights, and groups of 16 whose scales aren't e4m3, or e4m3 scales of others."""
        if (reason := _reason_against(query, "fp", (4,)) or _reason_against_groups(query)) is not None:
            return reason
        return _reason_against_group_scales(query)

    def pack(self, codes: Codes, gated: bool = False) -> TritonWeight:
        from quantkit_kernels.triton import fp4

        if codes.outer is None:
            return fp4.pack(codes.codes, codes.scale, gated=gated)
        return fp4.pack_fine(codes.codes, _e4m3_scales(codes, codes.outer), codes.outer, gated=gated)


class TritonW4A4(TritonKernel):
    """The same weights by activations that are rounded in groups of as many; as such where the GPU has an
    instruction for it, elsewhere decoded."""

    name = "triton-w4a4"

    def reason_against(self, query: KernelQuery) -> str | None:
        """Anything but e2m1 weights in groups of 16 (e4m3 scales), 32, 64 or 128 (powers of 2), with rounded
        activations."""
        reason = _reason_against(query, "fp", (4,), rounded=True) or _reason_against_groups(query)
        if reason is not None:
            return reason
        size = query.spec.granularity.size or 0
        if size > gpu.MAX_GROUP:
            return f"rounds activations in groups of up to {gpu.MAX_GROUP}, not {size}"
        return _reason_against_group_scales(query)

    def pack(self, codes: Codes, gated: bool = False) -> TritonWeight:
        from quantkit_kernels.triton.w4a4 import pack

        if codes.outer is None:
            return pack(codes.codes, codes.scale, gated=gated)
        return pack(codes.codes, _e4m3_scales(codes, codes.outer), codes.outer, codes.input_factor,
                    gated=gated)

    def filled(self, k: int, device: torch.device) -> int:
        """Of whole tiles of the instruction's."""
        from quantkit_kernels.triton import block_scaled, w4a4
        from quantkit_kernels.triton.fragment import family_of

        return -(-k // block_scaled.BK) * block_scaled.BK if family_of(device) in w4a4.NATIVE else k

    def run(self, x: torch.Tensor, prepared: TritonWeight) -> torch.Tensor:
        """``x [m, k]`` → ``[m, n]`` in x's dtype."""
        from quantkit_kernels.triton.matmul import multiply
        from quantkit_kernels.triton.token_groups import round_groups

        assert prepared.inputs is not None
        return multiply(round_groups(x, prepared.inputs), prepared)


class TritonIQ4(TritonKernel):
    """IQ4_NL's levels, in groups."""

    name = "triton-iq4"

    def reason_against(self, query: KernelQuery) -> str | None:
        """Anything but such weights in groups of 32, 64 or a multiple of 128."""
        if (reason := _reason_against(query, "iq", (4,)) or _reason_against_groups(query)) is not None:
            return reason
        return "takes groups of 32 or more" if query.spec.granularity.size == FINE else None

    def pack(self, codes: Codes, gated: bool = False) -> TritonWeight:
        from quantkit_kernels.triton import iq4

        return iq4.pack(codes.codes, scales_of(codes, gated), codes.spec.granularity.size or 0, gated=gated)


class TritonTrellis(TritonKernel):
    """A trellis with a learned table, whose levels are 8-bit integers."""

    name = "triton-trellis"

    def reason_against(self, query: KernelQuery) -> str | None:
        """Anything but a trellis with a window of 8 bits: levels of others are computed and wider."""
        if (reason := _reason_against(query, "trellis", (2, 3, 4))) is not None:
            return reason
        if query.spec.window != LEARNED:
            return f"looks levels up in a table of 8-bit states, not of {query.spec.window} bits"
        return None

    def pack(self, codes: Codes, gated: bool = False) -> TritonWeight:
        from quantkit_kernels.triton.trellis import pack

        bits = codes.spec.bits
        return pack(codes.codes, _by_row(codes), learned(bits), bits, gated=gated)


FINE = 16
"""Columns that share a scale which multiplies weights instead of their sum."""
SUPERBLOCK = 256


def _reason_against_groups(query: KernelQuery) -> str | None:
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


def _reason_against_group_scales(query: KernelQuery) -> str | None:
    """4-bit floats' groups with other scales than their size has."""
    spec = query.spec
    if (spec.scale_dtype == "e4m3") == (spec.granularity.size == FINE):
        return None
    return f"takes e4m3 scales of groups of 16, and powers of 2 of larger ones, not {spec.label()}"


def _e4m3_scales(codes: Codes, outer: torch.Tensor) -> torch.Tensor:
    """Scales without what they are multiples of."""
    return (codes.scale / outer).to(torch.float8_e4m3fn)


def _signed(codes: Codes) -> torch.Tensor:
    """int8 of 8-bit codes, whose middle is 128."""
    return (codes.codes ^ 128).view(torch.int8)


def _by_row(codes: Codes) -> torch.Tensor:
    """float32 ``[n]``."""
    return codes.scale.expand(codes.codes.shape[0], 1).reshape(-1)


W8 = TritonW8A16()
W4 = TritonW4A16()
NF = TritonNF4()
FP = TritonFP8()
INT = TritonW8A8()
FP4 = TritonFP4()
FP4A4 = TritonW4A4()
IQ4 = TritonIQ4()
TRELLIS = TritonTrellis()
