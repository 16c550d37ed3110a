"""Rounding to a trellis: to its nearest path, or column by column with the errors fed back.

QTIP, https://arxiv.org/abs/2406.11235, codes tiles of 16 by 16 weights and feeds back the errors of 16
columns at once. Here a ring of 64 weights lies along a column (:mod:`~quantkit.formats.trellis_code`): the
feedback is GPTQ's, from every column to all that are left, and coordinate descent can visit a column again
with all others fixed, whose best ring is again found by Viterbi's algorithm.

The squared error of Gaussian weights at 2, 3 and 4 bits is about 0.63, 0.55 and 0.5 of that of a uniform
grid, and there is one scale a row instead of one a group. Rows should look Gaussian, which the transform
``hadamard`` sees to.
"""

from __future__ import annotations

import torch

from quantkit.formats.base import Codes
from quantkit.formats.dtypes import resolve, scale_dtype
from quantkit.formats.spec import QuantSpec
from quantkit.formats.trellis_code import RING, decode, deviation, rings, unring
from quantkit.ops import viterbi
from quantkit.quantization.methods.hessian import NO_BETTER, HessianFactors, damped, losses
from quantkit.quantization.methods.stored_scales import (
    smallest,
)


def nearest(weight: torch.Tensor, spec: QuantSpec, notes: tuple[str, ...] = ()) -> Codes:
    """Round ``weight`` (float32 ``[out, in]``, *out* a multiple of 64) to the nearest path, data-free."""
    bits, window = _code(spec)
    tiles = rings(weight, window)
    scale = _rounded(tiles.square().mean(dim=1).sqrt() / deviation(bits, window), spec)
    wanted = (tiles / scale.unsqueeze(1)).reshape(-1, RING)
    even = viterbi.evened(scale).unsqueeze(1).expand(tiles.shape).reshape(-1, RING)
    symbols, values = (tensor.view(tiles.shape) for tensor in viterbi.nearest(wanted, even, bits, window))
    scale = _rounded((tiles * values).sum(dim=1) / values.square().sum(dim=1), spec, scale)
    return Codes(resolve(spec), unring(symbols, window), unring(scale.unsqueeze(1), window), notes=notes)


def solve(weight: torch.Tensor, hessian: torch.Tensor, factors: HessianFactors | None, spec: QuantSpec,
          descent_passes: int, notes: tuple[str, ...]) -> Codes:
    """Round ``weight`` (float32 ``[out, in]``) so that ``tr((W - Q) H (W - Q)ᵀ)`` becomes small.

    Rows of 64 which the nearest path serves better keep it.

    Args:
        weight: float32 ``[out, in]``, finite; *out* is a multiple of 64.
        hessian: float32 ``[in, in]``.
        factors: the factors of the damped Hessian; ``None`` means rounding to nearest.
        spec: a spec of kind ``trellis``.
        descent_passes: passes over all columns after solving, each with the others fixed.
        notes: for the result.
    """
    plain = nearest(weight, spec, notes)
    if factors is None:
        return plain
    order, window = factors.order, _code(spec)[1]
    form = damped(hessian, factors.damping, order)
    wanted = rings(weight, window)[:, order].contiguous()
    scale = rings(plain.scale, window).squeeze(1)
    symbols, values = viterbi.feed_back(wanted.clone(), factors.upper, scale, *_code(spec))
    scale = _refit(wanted, values, form, scale, spec)
    for _ in range(descent_passes):
        slopes = form @ (wanted - values * scale.unsqueeze(1))
        viterbi.visit(slopes, form, scale, *_code(spec), symbols, values)
        scale = _refit(wanted, values, form, scale, spec)
    symbols, values = (unring(tensor[:, order.argsort()], window) for tensor in (symbols, values))
    scale = unring(scale.unsqueeze(1), window)
    solved = losses(weight - values * scale, hessian)
    baseline = losses(weight - decode(plain.codes, *_code(spec)) * plain.scale, hessian)
    worse = ~(solved.view(-1, RING).sum(1) <= baseline.view(-1, RING).sum(1))  # also where a loss is NaN
    if bool(worse.all()):
        notes += (NO_BETTER,)
    pick = worse.repeat_interleave(RING).unsqueeze(1)
    return Codes(resolve(spec), torch.where(pick, plain.codes, symbols),
                 torch.where(pick, plain.scale, scale), notes=notes)


def _refit(weight: torch.Tensor, values: torch.Tensor, hessian: torch.Tensor, scale: torch.Tensor,
           spec: QuantSpec) -> torch.Tensor:
    """The exact minimizer for every row's scale: ``[tiles, in, 64]`` twice → ``[tiles, 64]``."""
    pull = hessian @ values
    return _rounded((pull * weight).sum(1) / (pull * values).sum(1), spec, scale)


def _code(spec: QuantSpec) -> tuple[int, int]:
    assert spec.window is not None
    return spec.bits, spec.window


def _rounded(scale: torch.Tensor, spec: QuantSpec, other: torch.Tensor | None = None) -> torch.Tensor:
    """Rounded to the dtype of scales; where that is not a positive number, ``other`` or the smallest is."""
    dtype = scale_dtype(spec)
    rounded = scale.clamp(max=torch.finfo(dtype).max / 128).to(dtype).float()
    lowest = torch.full_like(rounded, smallest(dtype))
    return torch.where(torch.isfinite(rounded) & (rounded >= lowest), rounded,
                       lowest if other is None else other)
