"""Finds the nearest rings of a trellis: directly, or column by column under a Hessian.

On a CPU kernels of our own do it, elsewhere torch. Rings are ``[…, 64]``; a tile is 64 rows of a weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quantkit.formats import trellis_code
from quantkit.formats.trellis_code import RING
from quantkit.ops.cpu_machine import isa, pool, reason_against_kernels
from quantkit.support.progress import tell_compiling

if TYPE_CHECKING:
    from quantkit_kernels.cpu.viterbi import ColumnSearch, Viterbi

FAR = 1e30
AT_ONCE = 1024
"""Rings that torch searches together."""


def nearest(target: torch.Tensor, weight: torch.Tensor, bits: int,
            window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rings with a small ``Σ (weight · (value − target))²``: the least for the place where each is cut.

    Args:
        target: float32 ``[n, 64]``.
        weight: float32 ``[n, 64]``, not negative.
        bits: the bits of a symbol.
        window: the bits of a state.

    Returns:
        Symbols uint8 and values float32, ``[n, 64]``.
    """
    return _nearest(target, weight, trellis_code.table(bits, window).to(target.device), bits)


def _nearest(target: torch.Tensor, weight: torch.Tensor, values: torch.Tensor,
             bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`nearest` where the states mean ``values``."""
    window = values.numel().bit_length() - 1
    symbols = torch.empty(target.shape, dtype=torch.uint8, device=target.device)
    if _by_kernel(target):
        from quantkit_kernels.cpu.viterbi import Viterbi

        nearest = torch.empty(target.shape)
        _run(Viterbi(bits, window), len(target), target=target.contiguous(), weight=weight.contiguous(),
             values=values, symbols=symbols, found=nearest)
        return symbols, nearest
    for start in range(0, len(target), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        symbols[part] = search(target[part], weight[part], values, bits)
    return symbols, values[trellis_code.states(symbols, bits, window)]


def feed_back(work: torch.Tensor, upper: torch.Tensor, scale: torch.Tensor, bits: int,
              window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """GPTQ, https://arxiv.org/abs/2210.17323: round a column, spread its error over those left.

    Args:
        work: float32 ``[tiles, in, 64]``, the weights; overwritten.
        upper: float32 ``[in, in]`` with ``H⁻¹ = Uᵀ U``.
        scale: float32 ``[tiles, 64]``, positive.
        bits: the bits of a symbol.
        window: the bits of a state.

    Returns:
        Symbols uint8 and values float32, ``[tiles, in, 64]``.
    """
    symbols = torch.empty(work.shape, dtype=torch.uint8, device=work.device)
    values = torch.empty(work.shape, device=work.device)
    if _by_kernel(work):
        _columns(False, work, upper, scale, bits, window, symbols, values)
        return symbols, values
    weight = evened(scale)
    for i in range(work.shape[1]):
        symbols[:, i], values[:, i] = nearest(work[:, i] / scale, weight, bits, window)
        error = (work[:, i] - values[:, i] * scale) / upper[i, i]
        work[:, i + 1:] -= upper[i, i + 1:, None] * error.unsqueeze(1)
    return symbols, values


def visit(slopes: torch.Tensor, hessian: torch.Tensor, scale: torch.Tensor, bits: int, window: int,
          symbols: torch.Tensor, values: torch.Tensor) -> None:
    """Change every column's rings where that lowers ``eᵀ H e``, all other columns fixed.

    Args:
        slopes: float32 ``[tiles, in, 64]``, ``H e`` of the weights' errors ``e``; overwritten.
        hessian: float32 ``[in, in]``, its diagonal positive.
        scale: float32 ``[tiles, 64]``, positive.
        bits: the bits of a symbol.
        window: the bits of a state.
        symbols, values: as :func:`feed_back` returns them; changed in place.
    """
    if _by_kernel(slopes):
        _columns(True, slopes, hessian, scale, bits, window, symbols, values)
        return
    weight = evened(scale)
    for i in range(slopes.shape[1]):
        old = values[:, i].clone()
        target = old + slopes[:, i] / (hessian[i, i] * scale)
        codes, new = nearest(target, weight, bits, window)
        further, before = ((weight * (value - target)).square().sum(1, keepdim=True) for value in (new, old))
        symbols[:, i] = torch.where(further > before, symbols[:, i], codes)
        values[:, i] = torch.where(further > before, old, new)
        slopes[:, i + 1:] -= hessian[i, i + 1:, None] * ((values[:, i] - old) * scale).unsqueeze(1)


def evened(scale: torch.Tensor) -> torch.Tensor:
    """What an error counts for in its ring ``[…, 64]``, of rows with these scales."""
    return scale / scale.mean(dim=-1, keepdim=True)


def search(target: torch.Tensor, weight: torch.Tensor, values: torch.Tensor, bits: int) -> torch.Tensor:
    """:func:`nearest` in torch: symbols uint8 ``[n, 64]``."""
    half = RING // 2
    cut = _path(target.roll(-half, 1), weight.roll(-half, 1), values, bits, None)[1][:, half - 1]
    return _path(target, weight, values, bits, cut % (values.numel() >> bits))[0]


def _path(target: torch.Tensor, weight: torch.Tensor, values: torch.Tensor, bits: int,
          cut: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Symbols uint8 and states int64 ``[count, steps]`` of the best way, from ``cut`` to ``cut`` if given."""
    count, steps = target.shape
    choices, ends = 1 << bits, values.numel() >> bits
    before = torch.zeros(count, ends, device=target.device)
    if cut is not None:
        before = torch.full_like(before, FAR).scatter_(1, cut.unsqueeze(1), 0.0)
    came = []
    for step in range(steps):
        error = (values - target[:, step:step + 1]) * weight[:, step:step + 1]
        total = before.repeat_interleave(choices, 1) + error.square()
        before, winner = total.view(count, choices, ends).min(dim=1)
        came.append(winner.to(torch.uint8))
    where = before.argmin(dim=1) if cut is None else cut
    states = torch.empty(count, steps, dtype=torch.int64, device=target.device)
    for step in reversed(range(steps)):
        winner = came[step].gather(1, where.unsqueeze(1)).squeeze(1).to(torch.int64)
        states[:, step] = winner * ends + where
        where = states[:, step] >> bits
    return (states & choices - 1).to(torch.uint8), states


def learned_levels(bits: int) -> tuple[list[int], float]:
    """Learn what the states of a window of 8 bits mean: by turns the nearest rings of a Gaussian source, and
    the mean of what each state stands for, https://doi.org/10.1109/TIT.1982.1056489. A state and the one
    with the other highest bit mean opposite numbers.

    Args:
        bits: the bits of a symbol.

    Returns:
        The levels of the states 0 to 127, −127 to 127, and what a standard deviation of the source is in
        them: :data:`~quantkit.formats.trellis_code.LEVELS` and ``DEVIATIONS``.
    """
    random = np.random.default_rng(3)
    source = torch.from_numpy(random.standard_normal((3000, RING), dtype=np.float32))
    spread = np.sort(random.standard_normal((128, 64)).ravel()).reshape(128, 64).mean(1)
    half = torch.from_numpy(random.permutation(spread))
    for _ in range(100):
        symbols, _ = _nearest(source, torch.ones_like(source), torch.cat((half, -half)).float(), bits)
        states = trellis_code.states(symbols, bits, trellis_code.LEARNED).flatten()
        sign = torch.where(states < 128, 1.0, -1.0)
        total = torch.bincount(states % 128, (source.flatten() * sign).double(), 128)
        half = total / torch.bincount(states % 128, minlength=128).clamp(min=1)
    factor = 127 / float(half.abs().max())
    return [round(level) for level in (half * factor).tolist()], round(factor, 2)


def _by_kernel(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and reason_against_kernels() is None


def _columns(again: bool, work: torch.Tensor, matrix: torch.Tensor, scale: torch.Tensor, bits: int,
             window: int, symbols: torch.Tensor, values: torch.Tensor) -> None:
    from quantkit_kernels.cpu.viterbi import ColumnSearch, Viterbi

    scale = scale.contiguous()
    _run(ColumnSearch(Viterbi(bits, window), again), len(work), work=work, matrix=matrix.contiguous(),
         scale=scale, weight=evened(scale), values=trellis_code.table(bits, window), symbols=symbols,
         found=values, columns=work.shape[1])


def _run(kernel: Viterbi | ColumnSearch, units: int, **arguments: Any) -> None:
    """A program of one operation, on all threads."""
    from quantkit_kernels.cpu.program import Program

    room = torch.empty(pool().threads, kernel.room_bytes, dtype=torch.uint8)
    program = Program(isa())
    program.add(kernel, units, room=room, room_private=kernel.room_bytes, **arguments)
    program.finish(tell_compiling)
    pool().run(program.records)
