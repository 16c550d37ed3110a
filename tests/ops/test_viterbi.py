"""Rings near to rings of numbers: the kernels, torch, and an independent search agree."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from quantkit.formats import trellis_code
from quantkit.ops import viterbi

CASES = [(2, 8), (3, 8), (4, 8), (2, 10), (2, 12), (3, 11), (3, 12), (4, 10), (4, 13)]


@pytest.fixture(params=["kernel", "torch"])
def way(request, monkeypatch):
    """Both ways of doing it."""
    if request.param == "torch":
        monkeypatch.setattr(viterbi, "_by_kernel", lambda x: False)
    return request.param


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 9


def cost(found, target, weight):
    return ((found - target) * weight).double().square().sum(-1)


def least(target, weight, values, bits, cut):
    """The least error of a ring that passes ``cut`` where it is cut: all states, in float64."""
    ends = len(values) >> bits
    before = np.full(ends, np.inf)
    before[cut] = 0
    for want, factor in zip(target, weight):
        total = before[np.arange(len(values)) >> bits] + ((values - want) * factor)**2
        before = total.reshape(-1, ends).min(0)
    return before[cut]


@pytest.mark.parametrize(("bits", "window"), CASES)
def test_the_nearest_ring_of_those_with_its_cut(way, bits, window):
    target, weight = numbers(6, 64), numbers(6, 64, seed=1).abs() / 9 + 0.1
    symbols, found = viterbi.nearest(target, weight, bits, window)
    states = trellis_code.states(symbols, bits, window)
    values = trellis_code.table(bits, window)
    assert torch.equal(found, values[states])
    cuts = states[:, -1] % (2**window >> bits)
    for row in range(6):
        ring, factor = target[row].double().numpy(), weight[row].double().numpy()
        best = least(ring, factor, values.double().numpy(), bits, int(cuts[row]))
        assert float(cost(found, target, weight)[row]) <= best * (1 + 1e-5)


@pytest.mark.parametrize(("bits", "most"), [(2, 0.085), (3, 0.0235), (4, 0.0068)])
@pytest.mark.parametrize("window", [8, 12])
def test_the_error_of_gaussian_numbers(bits, window, most):
    """Uniform grids leave 0.119, 0.0374 and 0.0115; no code leaves less than 0.0625, 0.0156 and 0.0039."""
    deviation = trellis_code.deviation(bits, window)
    target = numbers(400, 64) / 9 * deviation
    _, nearest = viterbi.nearest(target, torch.ones_like(target), bits, window)
    error = float((nearest - target).square().mean()) / deviation**2
    assert 4.0**-bits < error < most


@pytest.mark.sampled(3)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_table_is_what_is_learned(bits):
    levels, deviation = viterbi.learned_levels(bits)
    assert trellis_code.learned(bits) == (*levels, *(-level for level in levels))
    assert trellis_code.DEVIATIONS[bits] == deviation


def test_numbers_that_lie_elsewise_in_memory():
    target = numbers(64, 10).T
    found = viterbi.nearest(target, torch.ones(10, 64), 3, 12)
    assert all(map(torch.equal, found, viterbi.nearest(target.contiguous(), torch.ones(10, 64), 3, 12)))


def test_no_numbers_at_all(way):
    symbols, found = viterbi.nearest(torch.empty(0, 64), torch.empty(0, 64), 3, 12)
    assert symbols.shape == found.shape == (0, 64)


def problem(columns=40, tiles=3):
    x = numbers(200, columns, seed=3) / 9 @ numbers(columns, columns, seed=4)
    hessian = x.T @ x / 200 + torch.eye(columns)
    upper = torch.linalg.cholesky(hessian.double().inverse(), upper=True).float()
    scale = torch.rand(tiles, 64, generator=torch.Generator().manual_seed(5)) + 0.5
    return numbers(tiles, columns, 64, seed=6) * scale.unsqueeze(1), hessian, upper, scale


def loss(weight, values, scale, hessian):
    error = (weight - values * scale.unsqueeze(1)).double()
    return float((error * (hessian.double() @ error)).sum())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("columns", [1, 40, 64, 65, 150])
def test_kernel_and_torch_feed_back_alike(monkeypatch, columns):
    weight, hessian, upper, scale = problem(columns)
    both = []
    for by_kernel in (True, False):
        monkeypatch.setattr(viterbi, "_by_kernel", lambda x, by_kernel=by_kernel: by_kernel)
        symbols, found = viterbi.feed_back(weight.clone(), upper, scale, 3, 10)
        solved = loss(weight, found, scale, hessian)
        assert torch.equal(found, trellis_code.table(3, 10)[trellis_code.states(symbols, 3, 10)])
        slopes = hessian @ (weight - found * scale.unsqueeze(1))
        viterbi.visit(slopes, hessian, scale, 3, 10, symbols, found)
        assert torch.equal(found, trellis_code.table(3, 10)[trellis_code.states(symbols, 3, 10)])
        both.append((solved, loss(weight, found, scale, hessian)))
    # sums have another order, so that a path may be another one; what they cost is nearly the same
    assert both[0] == pytest.approx(both[1], rel=0.05)


def test_each_step_lowers_the_loss(way):
    weight, hessian, upper, scale = problem()
    even = viterbi.evened(scale).unsqueeze(1).expand(weight.shape).reshape(-1, 64)
    _, plain = viterbi.nearest((weight / scale.unsqueeze(1)).reshape(-1, 64), even, 3, 10)
    symbols, found = viterbi.feed_back(weight.clone(), upper, scale, 3, 10)
    losses = [loss(weight, plain.view(weight.shape), scale, hessian), loss(weight, found, scale, hessian)]
    for _ in range(3):
        viterbi.visit(hessian @ (weight - found * scale.unsqueeze(1)), hessian, scale, 3, 10, symbols, found)
        losses.append(loss(weight, found, scale, hessian))
    assert losses[1] < 0.8 * losses[0]
    assert all(after <= before * (1 + 1e-6) for before, after in itertools.pairwise(losses))
