"""The knapsack against all ways to fill it."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.quantization.budget.choose import allocate

GROUPS = st.lists(st.lists(st.tuples(st.one_of(st.just(0.0), st.floats(1e-12, 1e3)), st.integers(1, 10**6)),
                           min_size=1, max_size=4), min_size=1, max_size=5)


def total(table, chosen):
    return sum(options[index] for options, index in zip(table, chosen))


@settings(max_examples=150, deadline=None)
@given(GROUPS, st.floats(0, 1.1))
def test_no_other_choice_that_fits_costs_less(groups, share):
    costs = [[cost for cost, _ in options] for options in groups]
    sizes = [[size for _, size in options] for options in groups]
    least, most = sum(map(min, sizes)), sum(map(max, sizes))
    limit = int(least - 1 + share * (most - least + 2))
    every = [one for one in itertools.product(*(range(len(options)) for options in sizes))
             if total(sizes, one) <= limit]
    chosen = allocate(costs, sizes, limit)
    if not every:
        assert chosen is None
        return
    assert chosen is not None and total(sizes, chosen) <= limit
    best = min(total(costs, one) for one in every)
    largest = max(max(options) - min(options) for options in costs)
    assert total(costs, chosen) <= best * (1 + 2e-5) + 1e-8 * largest


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bits", [2.3, 3.5, 4.25, 7])
def test_real_sizes_fill_the_budget_and_beat_a_greedy_choice(bits):
    """A model of 80 layers, and the classical heuristic: the largest saving for each byte goes first."""
    chance = random.Random(0)
    widths = [2.25, 3.25, 4.25, 5.25, 6.25, 8.02, 16]
    costs, sizes = [], []
    for shape in 80 * [10240 * 8192, 8192 * 8192, 57344 * 8192, 8192 * 28672]:
        scale = math.exp(chance.gauss(0, 1.5))
        costs.append([scale * 4 ** -w * math.exp(chance.gauss(0, 0.1)) for w in widths[:-1]] + [0.0])
        sizes.append([16 + int(shape * w / 8) for w in widths])
    limit = int(bits * sum(options[-1] for options in sizes) / 16)
    chosen = allocate(costs, sizes, limit)
    assert limit * 0.9995 < total(sizes, chosen) <= limit
    greedy = [0] * len(sizes)
    while True:
        left = limit - total(sizes, greedy)
        steps = [((options[at] - options[at + 1]) / (size[at + 1] - size[at]), i)
                 for i, (options, size, at) in enumerate(zip(costs, sizes, greedy)) if at + 1 < len(size)
                 and size[at + 1] - size[at] <= left]
        if not steps:
            break
        greedy[max(steps)[1]] += 1
    assert total(costs, chosen) <= total(costs, greedy)
    if bits == 4.25:  # not all: a solution may take seconds
        assert allocate(costs, sizes, limit) == chosen


def test_the_solver_writes_nothing_to_stdout(capfd):
    """It has a line for trouble with precision, which a dozen budgets of such a table bring about."""
    chance = random.Random(1)
    sizes = [[16 + int(n * w) for w in (0.28, 0.41, 0.53, 0.66, 0.78, 1.003, 2)]
             for n in chance.choices((552960, 331776, 1769472, 884736), k=60)]
    costs = [[math.exp(chance.gauss(-8, 2)) * 4 ** -w for w in range(6)] + [0.0] for _ in sizes]
    least, most = sum(map(min, sizes)), sum(map(max, sizes))
    for share in range(1, 13):
        assert allocate(costs, sizes, least + (most - least) * share // 30) is not None
    print("ours")
    assert capfd.readouterr().out == "ours\n"


def test_a_limit_that_is_met_exactly_and_one_that_is_missed_by_a_byte():
    costs, sizes = [[3.0, 1.0], [3.0, 1.0]], [[1, 10**10], [1, 10**10]]
    assert allocate(costs, sizes, 2 * 10**10) == [1, 1]
    assert sorted(allocate(costs, sizes, 2 * 10**10 - 1)) == [0, 1]
    assert allocate(costs, sizes, 2) == [0, 0] and allocate(costs, sizes, 1) is None
