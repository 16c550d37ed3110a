"""The Hadamard rotation: an orthogonal matrix whose entries are all about equally large.

``R = diag(signs) · (Hartley_m ⊗ Hadamard_a)`` for a width ``a · m``, m odd, a a power of two. Weights ``W R``
have no outliers and look Gaussian, whatever ``W`` was: "incoherence processing" of QuIP#,
https://arxiv.org/abs/2402.04396, and QuaRot, https://arxiv.org/abs/2404.00456. As ``x Wᵀ = (x R)(W R)ᵀ``,
inputs are rotated when the model runs. Signs are pseudorandom and depend on the width alone, so that nothing
of it has to be stored.
"""

from __future__ import annotations

import functools
import math

import torch

_ROWS = 1024


def apply_hadamard(x: torch.Tensor) -> torch.Tensor:
    """``x R`` along the last dimension, in float32, back in x's dtype; a row's result is its own."""
    signs, mix = (part.to(x.device) for part in hadamard_factors(x.shape[-1]))
    return _mixed(x.float() * signs, mix).to(x.dtype)


def undo_hadamard(x: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`apply_hadamard`: what is mixed is symmetric, and its own inverse."""
    signs, mix = (part.to(x.device) for part in hadamard_factors(x.shape[-1]))
    return (_mixed(x.float(), mix) * signs).to(x.dtype)


def _mixed(x: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """float32 ``[…, n]`` times ``mix ⊗ Hadamard``."""
    turned = x.reshape(*x.shape[:-1], mix.shape[0], -1)
    span = turned.shape[-1]
    step = 1
    while step < span:
        pairs = turned.reshape(*turned.shape[:-1], span // (2 * step), 2, step)
        left, right = pairs.unbind(-2)
        turned = torch.stack((left + right, left - right), dim=-2).reshape(*pairs.shape[:-3], span)
        step *= 2
    if len(mix) > 1:  # term by term: a library's product may depend on the number of rows
        parts = turned.unsqueeze(-3)
        total = parts[..., 0, :] * mix[:, :1]
        for i in range(1, len(mix)):
            total = total + parts[..., i, :] * mix[:, i:i + 1]
        turned = total
    return (turned * (1 / math.sqrt(span))).reshape(x.shape)


def hadamard_factors(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a width's rotation is made of: signs float32 ``[width]`` and the Hartley transform ``[m, m]``."""
    return _signs(width), _hartley(width // (width & -width))


def rotate_hessian(form: torch.Tensor, symmetric: bool = True) -> torch.Tensor:
    """``Rᵀ H R`` of a form ``[n, n]`` on rows that are rotated; exactly symmetric if the form is."""
    turned = form.clone()
    for _ in range(2):  # its rows, then its columns; a part at a time, as a form may be large
        for start in range(0, len(turned), _ROWS):
            turned[start:start + _ROWS] = apply_hadamard(turned[start:start + _ROWS])
        turned = turned.T.contiguous()
    for start in range(0, len(turned) if symmetric else 0, _ROWS):
        rows, columns = turned[start:start + _ROWS, start:], turned[start:, start:start + _ROWS]
        mean = (rows + columns.T) / 2
        rows.copy_(mean)
        columns.copy_(mean.T)
    return turned


@functools.cache
def _signs(width: int) -> torch.Tensor:
    """float32 ``[width]`` of 1 and −1: the lowest bits of numbers mixed by splitmix64."""
    mask, signs = 2**64 - 1, []
    for i in range(width):
        z = (i + 1) * 0x9E3779B97F4A7C15 & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        signs.append(1.0 - 2.0 * ((z ^ z >> 31) & 1))
    return torch.tensor(signs)


@functools.cache
def _hartley(size: int) -> torch.Tensor:
    """The discrete Hartley transform, ``cos + sin``: symmetric, its own inverse. float32 ``[size, size]``."""
    place = torch.arange(size, dtype=torch.float64)
    angle = torch.outer(place, place) % size * (2 * math.pi / size)
    return ((angle.cos() + angle.sin()) / math.sqrt(size)).float()
