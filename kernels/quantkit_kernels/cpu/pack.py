"""Weights from their codes into the order in which :mod:`~quantkit_kernels.cpu.decoders` reads them.

All functions take and give torch tensors on the CPU. ``lanes`` is the instruction set's. Rows are padded to
a multiple of 32 and columns to whole subgroups (or groups, if there are any), with what multiplies to 0.
"""

from __future__ import annotations

import torch

from quantkit_kernels.cpu.matmul import STRIPE, SUB


def bf16(weight: torch.Tensor, lanes: int) -> torch.Tensor:
    """bfloat16 ``[n, k]`` → uint8."""
    blocks = _blocks(weight.view(torch.int16), lanes, SUB, 0)
    return _flat(blocks.unflatten(-1, (-1, 2)).transpose(2, 3))


def int8(codes: torch.Tensor, lanes: int, group: int = SUB) -> torch.Tensor:
    """Signed codes int8 ``[n, k]`` → uint8."""
    blocks = _blocks(codes, lanes, group, 0)
    return _flat(blocks.unflatten(-1, (-1, 2)).transpose(2, 3))


def int4(codes: torch.Tensor, lanes: int, group: int = SUB) -> torch.Tensor:
    """Codes uint8 ``[n, k]``, at most 15 → uint8."""
    runs = _blocks(codes, lanes, group, 0).unflatten(-1, (-1, 2, 4))  # [blocks, sub, lanes, 4, 2, 4]
    return _flat((runs[..., 0, :] | runs[..., 1, :] << 4).transpose(2, 3))


def nf4(codes: torch.Tensor, lanes: int, group: int = SUB) -> torch.Tensor:
    """Codes uint8 ``[n, k]``, at most 15 → uint8. The table's zero is code 7, which pads."""
    # k within a subgroup is [load, nibble, half, parity]; a word's place is 2 · lane + parity = 8 · run + at
    parts = _blocks(codes, lanes, group, 7).unflatten(-1, (4, 2, 2, 2))
    words = parts.permute(0, 1, 3, 4, 5, 2, 6).flatten(-2).unflatten(-1, (-1, 8))  # [.., load, nib, half, run, at]
    places = words.transpose(-3, -2)  # a run of 16 bytes: half, then at
    return _flat(places[:, :, :, 0] | places[:, :, :, 1] << 4)


def scales(scale: torch.Tensor, lanes: int) -> torch.Tensor:
    """``[n, groups]``, bfloat16 or float32 → the same dtype ``[blocks, groups, lanes]``; 0 pads."""
    return _rows(scale, lanes).transpose(1, 2).contiguous()


def _rows(x: torch.Tensor, lanes: int, value: int = 0) -> torch.Tensor:
    """``[n, k]`` → ``[blocks, lanes, k]``."""
    missing = -x.shape[0] % STRIPE
    return torch.nn.functional.pad(x, (0, 0, 0, missing), value=value).unflatten(0, (-1, lanes))


def _blocks(x: torch.Tensor, lanes: int, multiple: int, value: int) -> torch.Tensor:
    """``[n, k]`` → ``[blocks, subgroups, lanes, 32]``."""
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % max(multiple, SUB)), value=value)
    return _rows(x, lanes, value).unflatten(-1, (-1, SUB)).transpose(1, 2)


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8).flatten()
