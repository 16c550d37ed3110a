"""Calibration without text: windows of tokens that are drawn at random from the model's vocabulary.

What enters a model's Linears depends on its weights more than on the text: channels that are large on text
are large on random tokens too. Statistics of random tokens are therefore good enough to choose ranges and
scales. They need no data set and no text that the model writes, only a forward pass. ZeroQuant,
https://arxiv.org/abs/2206.01861, trains layers on random tokens where there is no data; here they make
Hessians.

Tokens of a byte-pair encoding are numbered in the order of their merges, frequent ones first. They are drawn
by Zipf's law in that order, which is closer to text than equal chances.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

OFFSET = 50.0
"""Added to a token's number in Zipf's law, as in Mandelbrot's form of it: flattens the beginning."""

CORRELATION = 0.4
"""Factor on what a Hessian of random tokens has beside its diagonal. The diagonal says how large inputs are,
and that is much the same on text. How inputs go together is only partly so."""


def random_windows(samples: int, length: int, vocabulary: int, left_out: Iterable[int],
                   seed: int) -> torch.Tensor:
    """Draw windows, int64 ``[windows, tokens]``.

    Args:
        samples, length: number of windows, and tokens in each.
        vocabulary: tokens are numbers below this.
        left_out: tokens that are never drawn, such as those that begin and end turns.
        seed: the same one gives the same tokens on every machine.
    """
    chances = 1 / (torch.arange(vocabulary, dtype=torch.float64) + OFFSET)
    chances[[token for token in left_out if token < vocabulary]] = 0
    cumulative = chances.cumsum(0)
    generator = torch.Generator().manual_seed(seed % 2**63)
    uniform = torch.rand(samples, length, dtype=torch.float64, generator=generator)
    return torch.searchsorted(cumulative, uniform * cumulative[-1], right=True).clamp_(max=vocabulary - 1)
