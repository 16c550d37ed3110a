"""What codes mean, whatever layout they come from.

Of some kinds a code is a place in a table of 16 levels: :data:`E2M1` are the 4-bit floating-point numbers of
https://arxiv.org/abs/2310.10537, :data:`IQ4` the levels that llama.cpp's IQ4_NL has instead of equal steps
(https://github.com/ggml-org/llama.cpp/pull/5590).
"""

from __future__ import annotations

import torch

from quantkit.formats import e4m3
from quantkit.formats.base import Codes
from quantkit.formats.spec import QuantSpec

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
IQ4 = (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0,
       1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0)


def level_table(spec: QuantSpec) -> tuple[float, ...] | None:
    """The value of every code, for kinds of 4 bits whose levels aren't equal steps."""
    if spec.kind == "iq":
        return IQ4
    return E2M1 if spec.kind == "fp" and spec.bits == 4 else None


def encode(levels: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """Values of levels, float32, exactly those that there are → their codes, uint8."""
    table = level_table(spec)
    if table is not None:
        values = torch.tensor(table, device=levels.device)
        order = torch.argsort(values, stable=True)
        places: torch.Tensor = order[torch.searchsorted(values[order], levels.contiguous())]
        return places.to(torch.uint8)
    return e4m3.encode(levels) if spec.kind == "fp" else levels.to(torch.uint8)


def level_values(codes: Codes) -> torch.Tensor:
    """The weight before it is scaled, float32 ``[out, in]``: whole numbers less their zero points (none with
    minima), or what a table or e4m3 says. For ``int``, ``fp`` and ``iq``.
    """
    spec, table = codes.spec, level_table(codes.spec)
    if table is not None:
        return torch.tensor(table, device=codes.codes.device)[codes.codes.long()]
    if spec.kind == "fp":
        return e4m3.decode(codes.codes)
    values = codes.codes.to(torch.float32)
    if spec.minimum:
        return values
    if codes.zero is None:
        return values.sub_(middle(spec))
    values.view(len(values), codes.scale.shape[1], -1).sub_(codes.zero.unsqueeze(-1))
    return values


def dequantize(codes: Codes) -> torch.Tensor:
    """The weight in float32 ``[out, in]``, for ``int``, ``fp`` and ``iq``."""
    values = level_values(codes)
    if codes.spec.granularity.strategy == "tile":
        size = codes.spec.granularity.size or 1
        return values.mul_(spread_tiles(codes.scale, size, (values.shape[0], values.shape[1])))
    grouped = values.view(len(values), codes.scale.shape[1], -1)
    grouped *= codes.scale.unsqueeze(-1)
    if codes.minimum is not None:
        grouped += codes.minimum.unsqueeze(-1)
    return values


def spread_tiles(scale: torch.Tensor, size: int, shape: tuple[int, int]) -> torch.Tensor:
    """The scale of every weight ``shape`` whose squares of ``size`` by ``size`` share one."""
    rows = scale.repeat_interleave(size, dim=0)[:shape[0]]
    return rows.repeat_interleave(size, dim=1)[:, :shape[1]]


def middle(spec: QuantSpec) -> int:
    """The level that means 0 where no zero point says otherwise."""
    return 1 << (spec.bits - 1)
