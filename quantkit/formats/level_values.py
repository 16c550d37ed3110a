"""What codes mean, whatever layout they come from, and the tables of kinds whose levels aren't equal steps.

NF4 has two: the 4-bit NormalFloat codebook, QLoRA, https://arxiv.org/abs/2305.14314, and the 8-bit map of
nested scales, https://arxiv.org/abs/1511.04561. Their values are those of bitsandbytes, bit for bit.
"""

from __future__ import annotations

import functools

import torch

from quantkit.formats import e4m3
from quantkit.formats.base import Codes
from quantkit.formats.spec import QuantSpec

CODEBOOK = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
            -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
            0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
            0.7229568362236023, 1.0)

ZERO = CODEBOOK.index(0.0)
"""The level that means 0, which also pads an odd number of weights."""

CELLS = 65536
"""Equal cells of [-1, 1] that nested scales are rounded to before the dynamic map is searched."""

_EXPONENTS = 7


@functools.cache
def _dynamic_map() -> torch.Tensor:
    values = [0.0, 1.0]
    for exponent in range(_EXPONENTS):
        edges = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        middles = (edges[:-1] + edges[1:]) / 2
        for sign in (1, -1):
            values += (sign * 10 ** (exponent + 1 - _EXPONENTS) * middles).tolist()
    return torch.tensor(sorted(values), dtype=torch.float32)


def codebook() -> torch.Tensor:
    """float32 ``[16]``, ascending. A fresh tensor: files may not share storage."""
    return torch.tensor(CODEBOOK, dtype=torch.float32)


def dynamic_map() -> torch.Tensor:
    """float32 ``[256]``, ascending: sign, a decimal exponent, and a fraction in the bits left over."""
    return _dynamic_map().clone()


@functools.cache
def nearest_cells() -> torch.Tensor:
    """uint8 ``[CELLS]``: for each cell's value, the nearest entry of the dynamic map. Not to be written."""
    table = _dynamic_map()
    values = 2.0 * torch.arange(CELLS, dtype=torch.float32) / (CELLS - 1) - 1.0
    return torch.bucketize(values, (table[:-1] + table[1:]) / 2).to(torch.uint8)


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
