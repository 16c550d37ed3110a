"""Specs and random codes that tests of formats, methods and operations share."""

from __future__ import annotations

from typing import Any

import torch

from quantkit.formats.base import Codes
from quantkit.formats.spec import Granularity, QuantSpec


def quant_spec(kind: str, bits: int, strategy: str, size: int | None = None, **more: Any) -> QuantSpec:
    """Any spec; NF4 has float32 scales, all others bfloat16."""
    return QuantSpec(kind=kind, bits=bits, granularity=Granularity(strategy=strategy, size=size),
                     **{"scale_dtype": "float32" if kind == "nf" else "bfloat16", **more})


def integer_spec(bits: int, group: int | None = None, symmetric: bool = True,
                 scale_dtype: str = "bfloat16") -> QuantSpec:
    """Integers in groups, or with a scale for each output channel."""
    return quant_spec("int", bits, "channel" if group is None else "group", group, symmetric=symmetric,
                      scale_dtype=scale_dtype)


def nf4_spec(nested: bool = False, size: int = 64) -> QuantSpec:
    """NF4 in blocks."""
    return quant_spec("nf", 4, "block", size, nested=nested)


def trellis_spec(bits: int, window: int = 12, scale_dtype: str = "bfloat16") -> QuantSpec:
    """A trellis with a scale for each output channel."""
    return quant_spec("trellis", bits, "channel", window=window, scale_dtype=scale_dtype)


def random_codes(spec: QuantSpec, rows: int, cols: int, seed: int = 0, lowest_zero: int = 0) -> Codes:
    """Codes ``[rows, cols]`` with scales between 0.1 and 1.1, and zero points if the spec is asymmetric."""
    random = torch.Generator().manual_seed(seed)
    shape = spec.scale_shape((rows, cols))
    scale = (torch.rand(shape, generator=random) + 0.1).to(getattr(torch, spec.scale_dtype)).float()
    codes = torch.randint(0, 2**spec.bits, (rows, cols), dtype=torch.uint8, generator=random)
    zero = torch.randint(lowest_zero, 2**spec.bits, shape, dtype=torch.uint8, generator=random)
    if spec.kind == "fp":
        codes[codes & 0x7F == 0x7F] = 0  # NaN
    return Codes(spec, codes, scale, zero if spec.kind == "int" and not spec.symmetric else None)
