"""Random codes of any spec, and the weight that they mean, worked out apart from every format."""

from __future__ import annotations

import torch

from quantkit.formats import e4m3, trellis_code
from quantkit.formats.base import Codes
from quantkit.formats.level_values import level_table
from quantkit.formats.nf4_table import codebook
from quantkit.methods.scale_rounding import multiples, rounded_scale
from quantkit.spec import QuantSpec


def random_codes(spec: QuantSpec, shape: tuple[int, int], seed: int = 0) -> Codes:
    """Every level, scales of a model's size rounded as the spec says, zero points from 1 on.

    GPTQ's first layout has no place for a zero point of 0.
    """
    random = torch.Generator().manual_seed(seed)
    scales = spec.scale_shape(shape)
    codes = torch.randint(0, 2**spec.bits, shape, generator=random, dtype=torch.uint8)
    if spec.kind == "fp" and spec.bits == 8:
        codes[codes & 0x7F == 0x7F] = 0
    stored = spec if spec.scale_dtype != "model" else spec.model_copy(update={"scale_dtype": "float32"})

    def numbers(size: tuple[int, ...]) -> torch.Tensor:
        return 0.01 * (0.5 + torch.rand(size, generator=random))

    def multiples_of(outer: torch.Tensor, lowest: float) -> torch.Tensor:
        counts = torch.randint(int(lowest), int(multiples(spec)[1]) + 1, scales, generator=random)
        return outer.repeat_interleave(scales[1] // outer.shape[1], dim=1) * counts

    outer_shape = spec.outer_shape(shape)
    if spec.superblock is not None and outer_shape is not None:
        outer, depth = (rounded_scale(numbers(outer_shape), stored) for _ in range(2))
        if spec.minimum:
            return Codes(spec, codes, multiples_of(outer, 1), minimum=-multiples_of(depth, 0), outer=outer,
                         outer_minimum=depth)
        return Codes(spec, codes, multiples_of(outer, multiples(spec)[0]), outer=outer)
    tensor_scale = torch.full(outer_shape, 2.0**-13) if outer_shape else None
    scale = rounded_scale(numbers(scales), stored, tensor_scale)
    if spec.signed or spec.kind == "iq":
        scale = scale * (1 - 2.0 * torch.randint(0, 2, scales, generator=random))
    zero = minimum = None
    if spec.minimum:
        minimum = rounded_scale(-8 * numbers(scales), stored)
    elif spec.kind == "int" and not spec.symmetric:
        zero = torch.randint(1, 2**spec.bits, scales, generator=random, dtype=torch.uint8)
    return Codes(spec, codes, scale, zero, minimum=minimum, outer=tensor_scale,
                 input_factor=torch.full((1, 1), 48.0) if spec.static_inputs else None)


def formula(codes: Codes) -> torch.Tensor:
    """float32 ``[out, in]``: what :class:`~quantkit.formats.base.Codes` says that they mean."""
    spec, shape = codes.spec, codes.codes.shape
    if spec.kind == "nf":
        size = spec.granularity.size or 1
        scale = codes.scale.repeat_interleave(size)[:codes.codes.numel()].reshape(shape)
        return codebook()[codes.codes.long()] * scale
    if spec.kind == "trellis":
        assert spec.window is not None
        return trellis_code.decode(codes.codes, spec.bits, spec.window) * codes.scale
    if spec.granularity.strategy == "tile":
        size = spec.granularity.size or 1
        squares = torch.arange(shape[0])[:, None] // size, torch.arange(shape[1])[None] // size
        return e4m3.decode(codes.codes) * codes.scale[squares]
    columns = shape[1] // codes.scale.shape[1]
    if (table := level_table(spec)) is not None:
        return torch.tensor(table)[codes.codes.long()] * codes.scale.repeat_interleave(columns, dim=1)
    if spec.kind == "fp":
        return e4m3.decode(codes.codes) * codes.scale
    if codes.minimum is not None:
        steps = codes.codes.float() * codes.scale.repeat_interleave(columns, dim=1)
        return steps + codes.minimum.repeat_interleave(columns, dim=1)
    zero: torch.Tensor | int = 2 ** (spec.bits - 1)
    if codes.zero is not None:
        zero = codes.zero.float().repeat_interleave(columns, dim=1)
    return (codes.codes.float() - zero) * codes.scale.repeat_interleave(columns, dim=1)
