"""The two tables of NF4: the 4-bit NormalFloat codebook and the 8-bit map of nested scales.

QLoRA, https://arxiv.org/abs/2305.14314, and 8-bit approximations, https://arxiv.org/abs/1511.04561.
Values are those of bitsandbytes, bit for bit.
"""

from __future__ import annotations

import functools

import torch

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
def _codebook() -> torch.Tensor:
    return torch.tensor(CODEBOOK, dtype=torch.float32)


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
    return _codebook().clone()


def dynamic_map() -> torch.Tensor:
    """float32 ``[256]``, ascending: sign, a decimal exponent, and a fraction in the bits left over."""
    return _dynamic_map().clone()


@functools.cache
def nearest_cells() -> torch.Tensor:
    """uint8 ``[CELLS]``: for each cell's value, the nearest entry of the dynamic map. Not to be written."""
    table = _dynamic_map()
    values = 2.0 * torch.arange(CELLS, dtype=torch.float32) / (CELLS - 1) - 1.0
    return torch.bucketize(values, (table[:-1] + table[1:]) / 2).to(torch.uint8)
