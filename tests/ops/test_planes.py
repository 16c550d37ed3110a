"""int8 weights in two planes: both together are the weight, and the high one alone is a coarser one."""

from __future__ import annotations

import pytest
import torch

from quantkit.ops.cpu_linear import INT8
from quantkit.ops.cpu_weight import multiply
from quantkit.ops.dispatch import codes_of


@pytest.mark.parametrize("group", [None, 32, 64])
@pytest.mark.parametrize(("n", "k"), [(1, 64), (33, 192), (96, 576)])
def test_both_planes_give_the_same_bits(make_weight, n, k, group):
    weight = INT8.prepare(make_weight(n, k, 8, group))
    planes = weight.in_planes()
    assert planes.has_planes and not weight.has_planes and planes.nbytes == weight.nbytes
    for rows in (1, 2, 3, 4, 7, 8, 9, 40):
        x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows))
        assert torch.equal(multiply(x, planes), multiply(x, weight))


@pytest.mark.parametrize("group", [None, 32])
def test_the_high_plane_is_the_middle_of_what_begins_so(make_weight, group):
    n, k = 40, 192
    weight = make_weight(n, k, 8, group)
    codes = codes_of(weight)
    values = (codes.codes.double() - 128).div(16).floor() * 16 + 8
    scale = codes.scale.double().reshape(n, -1).repeat_interleave(k // codes.scale.reshape(n, -1).shape[1], 1)
    high = INT8.prepare(weight).in_planes().high()
    assert high.weights.numel() * 2 == INT8.prepare(weight).weights.numel()
    for rows in (1, 4, 20):
        x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows))
        expected = x.double() @ (values * scale).T
        # activations are rounded to 8 bits
        assert (multiply(x, high) - expected).abs().max() < 0.02 * expected.abs().max()


def test_zero_points_have_no_planes(make_weight):
    weight = INT8.prepare(make_weight(32, 64, 8, 32, symmetric=False))
    assert weight.in_planes() is weight and weight.high() is weight
