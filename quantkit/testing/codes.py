"""Random codes of any spec, and the weight that they mean, worked out apart from every format."""

from __future__ import annotations

import torch

from quantkit.formats import e4m3, trellis_code
from quantkit.formats.base import Codes
from quantkit.formats.level_values import codebook, level_table
from quantkit.formats.spec import QuantSpec
from quantkit.quantization.methods.random_codes import random_codes as random_codes_from


def random_codes(spec: QuantSpec, shape: tuple[int, int], seed: int = 0) -> Codes:
    """:func:`quantkit.quantization.methods.random_codes.random_codes` on a CPU."""
    return random_codes_from(spec, shape, torch.Generator().manual_seed(seed))


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
