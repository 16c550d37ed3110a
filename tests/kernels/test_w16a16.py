"""Plain weights: against float64, over shapes that don't fit, and row by row."""

from __future__ import annotations

import pytest
import torch

from quantkit_kernels.triton.matmul import multiply
from quantkit_kernels.triton.w16a16 import pack


@pytest.mark.parametrize(("n", "k", "m"), [(1, 1, 1), (3, 16, 3), (33, 100, 17), (128, 64, 16),
                                           (130, 576, 1), (130, 576, 17), (257, 200, 130)])
def test_against_float64(on, randn, product_obeys_the_rule, n, k, m):
    x, weight = randn(m, k, on=on), randn(n, k, seed=1, on=on)
    product_obeys_the_rule(multiply(x, pack(weight)), x, weight.double())


def test_every_number_comes_to_its_place(on):
    weight = torch.arange(200 * 128, device=on[0]).reshape(200, 128) % 2039
    got = multiply(torch.eye(128, dtype=on[1], device=on[0]), pack(weight.to(on[1])))
    assert torch.equal(got, weight.to(on[1]).T)


def test_a_row_does_not_depend_on_the_others(on, randn, rows_stand_alone):
    rows_stand_alone(pack(randn(150, 1088, seed=1, on=on)), randn(16, 1088, on=on))


def test_refuses_other_dtypes():
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        pack(torch.zeros(2, 2, dtype=torch.float64))
