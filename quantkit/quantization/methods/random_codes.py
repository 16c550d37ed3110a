"""Codes that no weight was rounded to, to try kernels and formats with and to measure them."""

from __future__ import annotations

import torch

from quantkit.formats.base import Codes
from quantkit.formats.spec import QuantSpec
from quantkit.formats.trellis_code import deviation
from quantkit.quantization.methods.stored_scales import (
    multiples,
    rounded_scale,
)

RMS = {"int": 2**-1.8, "nf": 0.5, "fp": 100.0, "fp4": 3.0, "iq": 70.0}
"""How large random levels are, about; of ``int``, over ``2 ** bits``."""


def random_codes(spec: QuantSpec, shape: tuple[int, int], random: torch.Generator,
                 scale: float = 0.01) -> Codes:
    """Every level, scales rounded as the spec says, zero points from 1 on.

    GPTQ's first layout has no place for a zero point of 0.

    Args:
        spec: ``scale_dtype: model`` stands for float32.
        shape: the shape of the weight, ``(out, in)``.
        random: draws them, on its device.
        scale: the middle one.
    """
    device, scales = random.device, spec.scale_shape(shape)
    codes = torch.randint(0, 2**spec.bits, shape, generator=random, dtype=torch.uint8, device=device)
    if spec.kind == "fp" and spec.bits == 8:
        codes[codes & 0x7F == 0x7F] = 0
    stored = spec if spec.scale_dtype != "model" else spec.model_copy(update={"scale_dtype": "float32"})

    def numbers(size: tuple[int, ...]) -> torch.Tensor:
        return scale * (0.5 + torch.rand(size, generator=random, device=device))

    def counts(lowest: float) -> torch.Tensor:
        end = int(multiples(spec)[1]) + 1
        return torch.randint(int(lowest), end, scales, generator=random, device=device)

    outer_shape = spec.outer_shape(shape)
    if spec.superblock is not None and outer_shape is not None:
        outer, depth = (rounded_scale(numbers(outer_shape), stored) for _ in range(2))
        groups = scales[1] // outer_shape[1]
        if spec.minimum:
            return Codes(spec, codes, outer.repeat_interleave(groups, dim=1) * counts(1),
                         minimum=-depth.repeat_interleave(groups, dim=1) * counts(0), outer=outer,
                         outer_minimum=depth)
        return Codes(spec, codes, outer.repeat_interleave(groups, dim=1) * counts(multiples(spec)[0]),
                     outer=outer)
    tensor_scale = torch.full(outer_shape, 2.0**-13, device=device) if outer_shape else None
    drawn = rounded_scale(numbers(scales), stored, tensor_scale)
    if spec.signed or spec.kind == "iq":
        drawn = drawn * (1 - 2.0 * torch.randint(0, 2, scales, generator=random, device=device))
    zero = minimum = None
    if spec.minimum:
        minimum = rounded_scale(-8 * numbers(scales), stored)
    elif spec.kind == "int" and not spec.symmetric:
        zero = torch.randint(1, 2**spec.bits, scales, generator=random, dtype=torch.uint8, device=device)
    factor = torch.full((1, 1), 48.0, device=device) if spec.static_inputs else None
    return Codes(spec, codes, drawn, zero, minimum=minimum, outer=tensor_scale, input_factor=factor)


def scale_for(spec: QuantSpec, std: float) -> float:
    """The scale with which random weights are about as large as a normal distribution's of ``std``."""
    if spec.window is not None:
        return std / deviation(spec.bits, spec.window)
    rms = RMS[spec.grid if spec.grid in RMS else spec.kind] * (2.0**spec.bits if spec.kind == "int" else 1)
    return std / rms / (multiples(spec)[1] / 2 if spec.superblock else 1)
