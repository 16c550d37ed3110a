"""Weights from their codes into the order in which :mod:`~quantkit_kernels.cpu.decoders` reads them.

All functions take and give torch tensors on the CPU. ``lanes`` is the instruction set's. Rows are padded to
a multiple of 32 and columns to whole subgroups (or groups, if there are any), with what multiplies to 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from quantkit_kernels.cpu.weight_decoder import STRIPE, SUB

AT_ONCE = 1 << 19
"""Weights that are reordered at a time: more would be in memory twice."""


def rows(weight: torch.Tensor, read: Callable[[], None] = lambda: None, multiple: int = SUB) -> torch.Tensor:
    """A floating-point weight ``[n, k]``, or the codes of one, → uint8, row after row.

    It stays where it is if it has no padding to take; else ``read`` is called whenever some of it isn't
    needed any more.
    """
    count, columns = weight.shape
    if not (count % STRIPE or columns % multiple) and weight.is_contiguous():
        return weight.view(torch.uint8).flatten()
    out = torch.zeros(count + -count % STRIPE, columns + -columns % multiple, dtype=weight.dtype)
    for start in range(0, count, step := max(1, AT_ONCE // columns)):
        part = weight[start:start + step]
        out[start:start + len(part), :columns] = part
        read()
    return out.view(torch.uint8).flatten()


def int8(codes: torch.Tensor, lanes: int, group: int = SUB, middle: int = 0) -> torch.Tensor:
    """Codes int8, or uint8 of which ``middle`` means 0, ``[n, k]`` → uint8."""
    return _packed(codes, lanes, group, middle, lambda rows: _by_lane(rows - middle, torch.int16))


def int8_planes(packed: torch.Tensor, lanes: int) -> torch.Tensor:
    """What :func:`int8` gave → the same codes in two planes, high and low halves, each as :func:`int4` has
    them."""
    out = torch.empty_like(packed)
    high, low = out.view(2, -1)
    step = AT_ONCE // (8 * lanes) * 8 * lanes  # whole runs of eight values of each lane
    for start in range(0, packed.numel(), step):
        pairs = packed[start:start + step].view(-1, 4, lanes, 2) ^ 128
        eight = pairs.transpose(1, 2).reshape(-1, lanes, 2, 4)
        where = slice(start // 2, (start + pairs.numel()) // 2)
        first, second = eight.unbind(2)
        high[where] = (first >> 4 | second & 240).flatten()
        low[where] = (first & 15 | second << 4).flatten()
    return out


def int4(codes: torch.Tensor, lanes: int, group: int = SUB) -> torch.Tensor:
    """Codes uint8 ``[n, k]``, at most 15 → uint8."""
    def runs(rows: torch.Tensor) -> torch.Tensor:
        eight = rows.view(torch.int64)  # the low four beside the high four, which take the upper nibbles
        return (eight | eight >> 28).to(torch.int32).transpose(1, 2)

    return _packed(codes, lanes, group, 0, runs)


def wide_integers(codes: torch.Tensor, lanes: int, bits: int, group: int = SUB) -> torch.Tensor:
    """Codes uint8 ``[n, k]`` of 5 or 6 bits → uint8."""
    shared = 8 // (bits - 4)

    def runs(rows: torch.Tensor) -> torch.Tensor:
        # dimensions: block, subgroup, vector, lane; four values are a word, of which the middle two swap
        words = rows.view(torch.int32).transpose(1, 2).contiguous().unflatten(1, (-1, SUB // 4))
        words = words & 0xFF0000FF - 2**32 | words >> 8 & 0xFF00 | (words & 0xFF00) << 8
        low = words[:, :, ::2] & 0x0F0F0F0F | (words[:, :, 1::2] & 0x0F0F0F0F) << 4
        parts = (words >> 4 & 0x03030303).unflatten(2, (-1, shared))
        high = parts[:, :, :, 0]
        for place in range(1, shared):
            high = high | parts[:, :, :, place] << place * (bits - 4)
        return torch.cat((low, high), 2)

    return _packed(codes, lanes, group, 0, runs)


def narrow_integers(codes: torch.Tensor, lanes: int, bits: int, group: int = SUB) -> torch.Tensor:
    """Codes uint8 ``[n, k]`` of 2 or 3 bits → uint8."""
    def runs(rows: torch.Tensor) -> torch.Tensor:
        # dimensions: block, lane, subgroup, vector, value of four
        parts = rows.unflatten(-1, (-1, SUB // 4, 4)).permute(0, 2, 3, 1, 4)
        pairs = (parts & 3).unflatten(2, (2, 4)) << (torch.arange(4, dtype=torch.uint8) * 2)[:, None, None]
        low = pairs.sum(3, dtype=torch.uint8)
        if bits == 2:
            return low
        high = (parts >> 2) << torch.arange(8, dtype=torch.uint8)[:, None, None]
        return torch.cat((low, high.sum(2, keepdim=True, dtype=torch.uint8)), 2)

    return _packed(codes, lanes, group, 0, runs)


def w8a8(codes: torch.Tensor, lanes: int) -> torch.Tensor:
    """Codes uint8 ``[n, k]``, of which 128 means 0 → uint8: signed."""
    return _packed(codes, lanes, SUB, 128, lambda rows: _by_lane(rows ^ 128, torch.int32))


def nf4(codes: torch.Tensor, lanes: int, group: int = SUB) -> torch.Tensor:
    """Codes uint8 ``[n, k]``, at most 15 → uint8. The table's zero is code 7, which pads."""
    def runs(rows: torch.Tensor) -> torch.Tensor:
        # k in a subgroup is [load, nibble, half, parity]; a word's place is 2 · lane + parity = 8 · run + at
        parts = rows.unflatten(-1, (-1, 4, 2, 2, 2)).transpose(1, 2)  # [blocks, subgroups, lanes, …]
        words = parts.permute(0, 1, 3, 4, 5, 2, 6).flatten(-2).unflatten(-1, (-1, 8))
        places = words.transpose(-3, -2)  # [..., load, nibble, run, half, at]: a run is 16 bytes
        return places[:, :, :, 0] | places[:, :, :, 1] << 4

    return _packed(codes, lanes, group, 7, runs)


def trellis(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Symbols uint8 ``[n, k]`` of 2 to 4 bits, n a multiple of 64 → uint8. Each 16 rows of a ring are a place
    of its words."""
    rows, columns = codes.shape
    out = torch.empty(rows * (columns + -columns % SUB) * bits // 8, dtype=torch.uint8)
    parts = out.view(rows // 64, -1)
    for part, tile in zip(parts, codes.split(64)):  # a tile at a time: words are wide
        steps = torch.nn.functional.pad(tile, (0, -columns % SUB)).view(4, 16, -1).to(torch.int32)
        words = sum((steps[step] << (3 - step) * bits for step in range(4)), torch.zeros_like(steps[0]))
        pairs = words.unflatten(1, (-1, 2)).transpose(0, 1).flatten(1)  # [pairs, 32]
        if bits == 4:
            packed = pairs.to(torch.int16).view(torch.uint8)
        elif bits == 2:
            packed = pairs.to(torch.uint8)
        else:
            high = pairs >> 8
            packed = torch.cat((pairs & 255, high[:, :16] | high[:, 16:] << 4), 1).to(torch.uint8)
        part.copy_(packed.flatten())
    return out


def learned_trellis(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Symbols uint8 ``[n, k]`` of 2 to 4 bits, n a multiple of 64 → uint8, a column's 64 rows after the
    other's."""
    rows, columns = codes.shape
    out = torch.empty(rows // 64, columns + -columns % SUB, 8 * bits, dtype=torch.uint8)
    for part, tile in zip(out, codes.split(64)):  # a tile at a time: words are wide
        eight = torch.nn.functional.pad(tile, (0, -columns % SUB)).T.unflatten(1, (8, 8))
        words = torch.zeros(len(eight), 8, dtype=torch.int64)
        for place in range(8):
            words |= eight[:, :, place].long() << place * bits
        part.copy_(words.unsqueeze(-1).view(torch.uint8)[:, :, :bits].flatten(1))
    return out.flatten()


def scales(parts: torch.Tensor | Sequence[torch.Tensor], lanes: int) -> torch.Tensor:
    """``[n, groups]`` of any dtype → the same dtype ``[blocks, groups, lanes]``; several, such as scales and
    minima, → ``[blocks, groups, parts, lanes]``. 0 pads."""
    several = [parts] if isinstance(parts, torch.Tensor) else parts
    laid = torch.stack([_rows(part, lanes).transpose(1, 2) for part in several], dim=2)
    return laid.squeeze(2) if len(several) == 1 else laid


def _packed(x: torch.Tensor, lanes: int, multiple: int, value: int,
            order: Callable[[torch.Tensor], torch.Tensor],
            read: Callable[[], None] = lambda: None) -> torch.Tensor:
    """``[n, k]`` → bytes, some rows at a time; ``order`` takes contiguous ``[blocks, lanes, k]``."""
    rows, columns = x.shape
    missing = -columns % max(multiple, SUB)
    step = max(1, AT_ONCE // (columns + missing) // STRIPE) * STRIPE
    out: torch.Tensor | None = None
    end = 0
    for start in range(0, rows, step):
        part = x[start:start + step]
        if missing:
            part = torch.nn.functional.pad(part, (0, missing), value=value)
        blocks = _rows(part.contiguous(), lanes, value)
        packed = order(blocks).contiguous().view(torch.uint8).flatten()
        if out is None:
            out = torch.empty(packed.numel() // (blocks.shape[0] * lanes) * (-(-rows // STRIPE) * STRIPE),
                              dtype=torch.uint8)
        out[end:end + packed.numel()] = packed
        end += packed.numel()
        read()
    return torch.empty(0, dtype=torch.uint8) if out is None else out


def _by_lane(rows: torch.Tensor, word: torch.dtype) -> torch.Tensor:
    """``[blocks, lanes, k]`` → ``[blocks, words, lanes]``: neighbors of a row stay together in a word, which
    is copied several times as fast as they are one by one."""
    return rows.view(word).transpose(1, 2)


def _rows(x: torch.Tensor, lanes: int, value: int = 0) -> torch.Tensor:
    """``[n, k]`` → ``[blocks, lanes, k]``."""
    missing = -x.shape[0] % STRIPE
    if missing:
        x = torch.nn.functional.pad(x, (0, 0, 0, missing), value=value)
    return x.unflatten(0, (-1, lanes))
