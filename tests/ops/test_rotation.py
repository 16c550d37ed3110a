"""Rotations: orthogonal, flat, undone by the weights, and the same in the row kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantkit.ops.hadamard import apply_hadamard, hadamard_factors, rotate_hessian, undo_hadamard

WIDTHS = [1, 2, 3, 5, 12, 64, 100, 192, 576, 1000, 1536]


@pytest.mark.parametrize("width", WIDTHS)
def test_orthogonal_and_flat(width):
    matrix = apply_hadamard(torch.eye(width)).double()
    assert (matrix @ matrix.T - torch.eye(width)).abs().max() < 1e-5
    assert matrix.abs().max() * width**0.5 <= 1.4143  # an outlier is spread over all


@pytest.mark.parametrize("width", WIDTHS)
def test_the_matrix_of_its_definition(width):
    signs, mix = hadamard_factors(width)
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) * len(mix) < width:
        hadamard = torch.cat((torch.cat((hadamard, hadamard), 1), torch.cat((hadamard, -hadamard), 1)))
    expected = signs.double()[:, None] * torch.kron(mix.double(), hadamard / len(hadamard)**0.5)
    assert (apply_hadamard(torch.eye(width)).double() - expected).abs().max() < 1e-6
    assert torch.equal(signs.abs(), torch.ones(width))
    if width >= 64:
        assert 0.3 < float((signs > 0).float().mean()) < 0.7


@pytest.mark.parametrize("width", WIDTHS)
def test_undone(width):
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(0))
    assert (undo_hadamard(apply_hadamard(x)) - x).abs().max() < 1e-5


def test_a_product_stays_what_it_was():
    x, weight = torch.randn(5, 2, 192), torch.randn(7, 192)
    expected = x @ weight.T
    assert (apply_hadamard(x) @ apply_hadamard(weight).T - expected).abs().max() < 1e-4


def test_a_form_stays_what_it_was():
    x, weight = torch.randn(50, 96), torch.randn(7, 96)
    form = x.T @ x
    expected = ((weight @ form) * weight).sum(1)
    turned = rotate_hessian(form)
    assert torch.equal(turned, turned.T)
    found = ((apply_hadamard(weight) @ turned) * apply_hadamard(weight)).sum(1)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_rows_are_alone_and_keep_their_dtype():
    x = torch.randn(40, 576).bfloat16()
    every = apply_hadamard(x)
    assert every.dtype == torch.bfloat16
    assert torch.equal(every[7:8], apply_hadamard(x[7:8]))
