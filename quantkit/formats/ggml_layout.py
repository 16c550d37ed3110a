"""The blocks of llama.cpp's types of weights: levels and scales ⇄ bytes.

A row is a run of blocks of 32 weights, or of 256 in the K types, whose blocks have sub-blocks of 16 or 32.
Scales are float16. https://github.com/ggml-org/ggml, ``ggml-common.h`` and ``ggml-quants.c``.

==========  =====  ================================================================================
type        bytes  in this order
==========  =====  ================================================================================
Q8_0        34     scale, 32 int8
Q4_0        18     scale, 16 pairs of levels: those of weight i and i + 16
Q4_1        20     scale, minimum, pairs
Q5_0        22     scale, fifth bits of 32 levels, pairs of their low four
Q5_1        24     scale, minimum, fifth bits, pairs
IQ4_NL      18     scale, pairs of places in a table
Q4_K        144    scale and depth of 8 sub-blocks, 12 bytes of their multiples, 128 of pairs
Q5_K        176    the same with 32 bytes of fifth bits before the pairs
Q6_K        210    128 bytes of low four bits, 64 of high two, 16 int8 multiples, scale
==========  =====  ================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

HALF = 16
"""A byte's low half is the level of one weight, its high half that of the weight 16 places further on."""


@dataclass(frozen=True)
class BlockParts:
    """Blocks taken apart.

    Attributes:
        levels: uint8 ``[blocks, weights]``.
        scale: float32 ``[blocks]``, as float16 holds it.
        minimum: float32 ``[blocks]``, likewise: the minimum, or of K types the depth, whose multiples are
            taken away.
        multiples: int16 ``[blocks, sub-blocks]``, of the scale.
        depths: uint8 ``[blocks, sub-blocks]``, multiples of the depth.
    """

    levels: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor | None = None
    multiples: torch.Tensor | None = None
    depths: torch.Tensor | None = None


def packed_blocks(kind: str, parts: BlockParts) -> torch.Tensor:
    """uint8 ``[blocks, bytes]`` of a type in the table above."""
    scale, levels = _half(parts.scale), parts.levels
    minimum = [] if parts.minimum is None else [_half(parts.minimum)]
    if kind == "Q8_0":
        return _joined([scale, levels ^ 128])
    if kind in ("Q4_0", "Q4_1", "IQ4_NL"):
        return _joined([scale, *minimum, _pairs(levels, HALF)])
    if kind in ("Q5_0", "Q5_1"):
        return _joined([scale, *minimum, _bits(levels >> 4), _pairs(levels & 15, HALF)])
    if kind == "Q6_K":
        assert parts.multiples is not None
        halves = levels.view(-1, 2, 4, 32)  # of 128 weights, four runs of 32
        low = halves & 15
        low = torch.stack([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], dim=2)
        high = halves >> 4
        high = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
        return _joined([low.flatten(1), high.flatten(1), parts.multiples.to(torch.int8).view(torch.uint8),
                        scale])
    assert parts.multiples is not None and parts.depths is not None
    steps = _six_bits(parts.multiples.to(torch.uint8), parts.depths)
    runs = levels.view(-1, 8, 32)
    fifth = []
    if kind == "Q5_K":
        fifth = [_weighed(runs >> 4, dim=1)]
    return _joined([scale, *minimum, steps, *fifth, _pairs(runs & 15, 32)])


def unpacked_blocks(kind: str, blocks: torch.Tensor) -> BlockParts:
    """The inverse of :func:`packed_blocks`."""
    if kind == "Q8_0":
        return BlockParts(blocks[:, 2:] ^ 128, _real(blocks[:, :2]))
    if kind in ("Q4_0", "Q4_1", "IQ4_NL", "Q5_0", "Q5_1"):
        at = 4 if kind.endswith("_1") else 2
        minimum = _real(blocks[:, 2:4]) if at == 4 else None
        levels = _unpaired(blocks[:, -HALF:], HALF)
        if kind.startswith("Q5"):
            levels = levels | _unbits(blocks[:, at:at + 4]) << 4
        return BlockParts(levels, _real(blocks[:, :2]), minimum)
    if kind == "Q6_K":
        low, high = blocks[:, :128].reshape(-1, 2, 2, 32), blocks[:, 128:192].reshape(-1, 2, 1, 32)
        low = torch.cat([low & 15, low >> 4], dim=2)
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).view(4, 1)
        levels = low | (high >> shifts & 3) << 4
        multiples = blocks[:, 192:208].contiguous().view(torch.int8).to(torch.int16)
        return BlockParts(levels.flatten(1), _real(blocks[:, 208:]), multiples=multiples)
    multiples, depths = _from_six_bits(blocks[:, 4:16])
    levels = _unpaired(blocks[:, -128:].reshape(-1, 4, 32), 32).view(-1, 8, 32)
    if kind == "Q5_K":
        shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(8, 1)
        levels = levels | (blocks[:, 16:48].unsqueeze(1) >> shifts & 1) << 4
    return BlockParts(levels.flatten(1), _real(blocks[:, :2]), _real(blocks[:, 2:4]),
                      multiples.to(torch.int16), depths)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.flatten(1) for part in parts], dim=1).contiguous()


def _half(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float16).unsqueeze(1).view(torch.uint8)


def _real(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.contiguous().view(torch.float16).float().squeeze(1)


def _pairs(levels: torch.Tensor, apart: int) -> torch.Tensor:
    runs = levels.view(len(levels), -1, 2, apart)
    return runs[:, :, 0] | runs[:, :, 1] << 4


def _unpaired(pairs: torch.Tensor, apart: int) -> torch.Tensor:
    pairs = pairs.reshape(len(pairs), -1, 1, apart)
    return torch.cat([pairs & 15, pairs >> 4], dim=2).flatten(1)


def _bits(flags: torch.Tensor) -> torch.Tensor:
    """uint8 0 or 1 ``[blocks, 32]`` → 4 bytes, the first flag lowest."""
    return _weighed(flags.view(-1, 4, 8), dim=2)


def _weighed(flags: torch.Tensor, dim: int) -> torch.Tensor:
    """Eight flags along ``dim`` → a byte, the first lowest."""
    shape = [8 if place == dim else 1 for place in range(flags.dim())]
    weights = (1 << torch.arange(8, dtype=torch.int16, device=flags.device)).view(shape)
    return (flags.to(torch.int16) * weights).sum(dim=dim).to(torch.uint8)


def _unbits(data: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    return (data.unsqueeze(2) >> shifts & 1).flatten(1)


def _six_bits(multiples: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
    """Eight numbers of 6 bits and eight more in 12 bytes: of the last four of each, the low four bits share
    bytes, and the high two lie above the first four's bits."""
    first = multiples[:, :4] | multiples[:, 4:] >> 4 << 6
    second = depths[:, :4] | depths[:, 4:] >> 4 << 6
    return torch.cat([first, second, multiples[:, 4:] & 15 | depths[:, 4:] << 4], dim=1)


def _from_six_bits(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    first = data[:, :4]
    second = data[:, 4:8]
    third = data[:, 8:]
    return (torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=1),
            torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=1))
