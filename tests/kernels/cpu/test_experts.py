"""Who gets which row, and in which order pairs lie."""

from __future__ import annotations

import pytest
import torch

from quantkit.models.layers import route
from quantkit_kernels.cpu.experts import OrderPairs, Route
from quantkit_kernels.cpu.isa import PLAIN
from quantkit_kernels.cpu.pool import Pool
from quantkit_kernels.cpu.product_spec import MOST_ROWS
from quantkit_kernels.cpu.program import Program


def run(scores, chosen, normalized):
    """Numbers and shares ``[rows, chosen]``; rows and places of pairs; tiles, and their number."""
    rows, experts = scores.shape
    pairs = rows * chosen
    numbers, order, places = (torch.full((pairs,), -1) for _ in range(3))
    shares, tiles, count = torch.zeros(pairs), torch.full((pairs, 3), -1), torch.zeros(1, dtype=torch.int64)
    program = Program(PLAIN)
    program.add(Route(), rows, scores=scores.clone(), scores_stride=4 * experts, numbers=numbers,
                shares=shares, experts=experts, chosen=chosen, normalized=int(normalized))
    program.add(OrderPairs(), numbers=numbers, rows=order, places=places, tiles=tiles, count=count,
                next=torch.zeros(experts, dtype=torch.int64), experts=experts, chosen=chosen, pairs=pairs)
    program.finish()
    pool = Pool(2)
    pool.run(program.records)
    pool.close()
    return numbers.view(rows, chosen), shares.view(rows, chosen), order, places, tiles, int(count)


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(("rows", "experts", "chosen"), [(1, 4, 2), (7, 128, 8), (300, 5, 2), (40, 3, 3)])
def test_experts_are_those_of_torch_and_pairs_lie_by_expert(rows, experts, chosen, normalized):
    scores = torch.randn(rows, experts, generator=torch.Generator().manual_seed(rows)).round(decimals=1)
    numbers, shares, order, places, tiles, count = run(scores, chosen, normalized)
    expected, theirs = route(scores, chosen, normalized)
    assert torch.equal(numbers, expected)
    torch.testing.assert_close(shares, theirs)
    assert sorted(places.tolist()) == [*range(rows * chosen)]
    assert torch.equal(order[places], torch.arange(rows * chosen) // chosen)
    by_place = numbers.flatten()[places.argsort()]
    assert torch.equal(by_place, numbers.flatten().sort().values)
    begin = 0
    for number, first, size in tiles[:count].tolist():
        assert first == begin and 0 < size <= MOST_ROWS and (by_place[first:first + size] == number).all()
        begin += size
    assert begin == rows * chosen and (tiles[count:] == -1).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_shows_and_breaks_nothing(value):
    scores = torch.randn(3, 6)
    scores[1, 4] = value
    numbers, shares, *_ = run(scores, 2, True)
    assert all(len(set(row)) == 2 for row in numbers.tolist()) and numbers.max() < 6
    assert shares[1].isnan().all() and shares[[0, 2]].isfinite().all()
