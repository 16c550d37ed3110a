"""Ada-KV by its definition."""

from __future__ import annotations

import pytest
import torch

from quantkit.kv.policies.snapkv import AdaKV, SnapKV


@pytest.mark.parametrize("floor", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("budget", [0.25, 0.5, 12])
def test_the_best_of_all_heads_stay_and_of_each_so_many(held, floor, budget):
    weights = torch.rand(3, 40, generator=torch.Generator().manual_seed(2))
    weights[1] *= 0.1  # a head that nobody looks at much
    policy = AdaKV(budget=budget, window=3, kernel=1, floor=floor)
    slots = policy.keep(held(torch.arange(40).expand(3, -1), window_attention=weights))
    count = 12 if budget == 12 else int(40 * budget)
    scores = weights.clone()
    scores[:, -3:] = torch.inf
    chosen = []
    for head in range(3):
        safe = scores[head].topk(max(1, int(count * floor))).indices.tolist()
        chosen += [(head, slot) for slot in sorted({*safe, 37, 38, 39})]
    others = sorted(((float(scores[h, s]), h, s) for h in range(3) for s in range(40)
                     if (h, s) not in chosen), reverse=True)
    chosen += [(h, s) for _, h, s in others[:3 * count - len(chosen)]]
    assert [(h, int(s)) for h, row in enumerate(slots) for s in row] == sorted(chosen)
    if floor < 1:
        assert len({len(row) for row in slots}) > 1


def test_with_a_floor_of_1_it_is_snapkv(held):
    weights = torch.rand(3, 40, generator=torch.Generator().manual_seed(3))
    options = {"budget": 0.4, "window": 5, "kernel": 3}
    mine, its = (kind.keep(held(torch.arange(40).expand(3, -1), window_attention=weights))
                 for kind in (AdaKV(**options, floor=1), SnapKV(**options)))
    assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))


def test_heads_of_different_lengths(held):
    """A second prompt in the same conversation: nothing beyond a head's end is ever kept."""
    positions = torch.stack((torch.arange(40), torch.cat((torch.arange(10, 40), torch.full((10,), -1)))))
    weights = torch.rand(2, 40, generator=torch.Generator().manual_seed(4)).masked_fill(positions < 0, 0.0)
    for kind in (AdaKV(budget=0.5, window=4), SnapKV(budget=0.5, window=4)):
        slots = kind.keep(held(positions, window_attention=weights))
        assert sum(map(len, slots)) == 20 + 20
        assert slots[0][-4:].tolist() == [36, 37, 38, 39] and slots[1][-4:].tolist() == [26, 27, 28, 29]
