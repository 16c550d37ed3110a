"""Random codes of any spec, and the weight that they mean, worked out apart from every format."""

from __future__ import annotations

import torch

from quantkit.formats import e4m3, trellis_code
from quantkit.formats.base import Codes
from quantkit.formats.dtypes import FLOATS
from quantkit.formats.nf4_table import codebook
from quantkit.spec import QuantSpec


def random_codes(spec: QuantSpec, shape: tuple[int, int], seed: int = 0) -> Codes:
    """Every level, scales of a model's size rounded as the spec says, zero points from 1 on.

    GPTQ's first layout has no place for a zero point of 0.
    """
    random = torch.Generator().manual_seed(seed)
    scales = spec.scale_shape(shape)
    dtype = FLOATS["float32" if spec.scale_dtype == "model" else spec.scale_dtype]
    scale = (0.01 * (0.5 + torch.rand(scales, generator=random))).to(dtype).float()
    zero = None
    if spec.kind == "int" and not spec.symmetric:
        zero = torch.randint(1, 2**spec.bits, scales, generator=random, dtype=torch.uint8)
    codes = torch.randint(0, 2**spec.bits, shape, generator=random, dtype=torch.uint8)
    if spec.kind == "fp":
        codes[codes & 0x7F == 0x7F] = 0
    return Codes(spec, codes, scale, zero)


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
    if spec.kind == "fp":
        return e4m3.decode(codes.codes) * codes.scale
    columns = shape[1] // codes.scale.shape[1]
    zero: torch.Tensor | int = 2 ** (spec.bits - 1)
    if codes.zero is not None:
        zero = codes.zero.float().repeat_interleave(columns, dim=1)
    return (codes.codes.float() - zero) * codes.scale.repeat_interleave(columns, dim=1)
