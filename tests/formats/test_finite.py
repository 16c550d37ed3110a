"""Whether values are finite, whatever their sum is."""

import pytest
import torch

from quantkit.formats.finite import all_finite


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_finite_values_whose_sum_is_not(dtype):
    largest = torch.finfo(dtype).max
    values = torch.full((1500, 3), largest, dtype=dtype)
    assert not torch.isfinite(values.sum()) and all_finite(values)
    for bad in (float("nan"), float("inf"), -float("inf")):
        values[1400, 1] = bad
        assert not all_finite(values)


def test_infinities_that_cancel_and_nothing_at_all():
    assert not all_finite(torch.tensor([float("inf"), -float("inf")]))
    assert all_finite(torch.empty(0, 4)) and all_finite(torch.zeros(2))
