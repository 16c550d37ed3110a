"""Rotated vectors: their codebooks are near the best there are, and a common part costs nothing."""

from __future__ import annotations

import pytest
import torch

from quantkit.kv.codecs.kivi import GroupedGrid
from quantkit.kv.codecs.rotation import CURVES, HadamardVectors, levels
from quantkit.ops.hadamard import apply_hadamard, undo_hadamard
from quantkit_kernels.cpu import kv_codecs

BEST = {2: 0.1175, 3: 0.03454, 4: 0.009497}
"""Least mean squared error of any codebook of so many bits for a Gaussian of variance 1: Max 1960."""


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_codebooks_are_near_the_best(bits):
    normal = torch.distributions.Normal(0, 1).icdf((torch.arange(100000) + 0.5) / 100000)
    book = levels(bits)
    assert len(book) == 2**bits and (book.diff() > 0).all() and torch.equal(book, -book.flip(0))
    error = (normal[:, None] - book).abs().amin(1).square().mean()
    assert BEST[bits] * 0.99 < error < BEST[bits] * 1.025


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_error_is_that_of_the_codebook_whatever_comes(bits):
    make = torch.Generator().manual_seed(0)
    x = torch.randn(64, 128, generator=make) * torch.randn(128, generator=make).exp()
    coding = HadamardVectors(bits, centered=False)
    back = undo_hadamard(coding.decode(coding.encode(apply_hadamard(x))))
    assert (back - x).square().sum() / x.square().sum() < 1.1 * BEST[bits]
    straight = GroupedGrid(bits, channels=False)
    assert (straight.decode(straight.encode(x)) - x).square().sum() > 1.3 * (back - x).square().sum()


def test_what_tokens_have_in_common_costs_nothing():
    make = torch.Generator().manual_seed(0)
    apart = torch.randn(64, 64, generator=make)
    for common in (0.0, 100.0):
        x = apply_hadamard(apart + common * torch.randn(1, 64, generator=make))
        coding = HadamardVectors(3, centered=True)
        error = (coding.decode(coding.encode(x)) - x).square().mean()
        # beside the codebook's, the mean's own rounding to bfloat16
        assert error < 0.04 + (common * 2**-8) ** 2 / 4
        alone = HadamardVectors(3, centered=False)
        assert common == 0 or (alone.decode(alone.encode(x)) - x).square().mean() > 10 * error


def test_kernels_and_reference_have_the_same_curves():
    assert kv_codecs.CURVES == CURVES
