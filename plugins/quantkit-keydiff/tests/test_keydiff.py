"""KeyDiff: the kit's promises, and that it keeps what differs."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from quantkit.kv.base import PolicyView
from quantkit.testing import check_policy
from quantkit_keydiff.policy import KeyDiff


def view_of(keys: torch.Tensor) -> PolicyView:
    """A view of ``keys [Hkv, S, D]`` alone: whoever asks for more gets an error."""
    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("KeyDiff needs keys alone")

    heads, length = keys.shape[:2]
    return PolicyView(0, 1, (length,) * heads, length, length, refuse, lambda: keys, refuse, refuse, refuse,
                      refuse)


def test_contract() -> None:
    check_policy(KeyDiff)
    check_policy(KeyDiff, budget=100, window=0, sinks=0)


def test_keys_that_differ_from_the_others_stay() -> None:
    random = torch.Generator().manual_seed(0)
    common = torch.randn(2, 1, 32, generator=random)
    keys = common + 0.05 * torch.randn(2, 200, 32, generator=random)
    odd = [[17, 90, 150], [30, 31, 120]]
    for head, places in enumerate(odd):
        keys[head, places] = torch.randn(3, 32, generator=random) * 2
    kept = KeyDiff(budget=3 + 8 + 2, window=8, sinks=2).keep(view_of(keys))
    assert kept is not None
    for head, places in enumerate(odd):
        assert kept[head].tolist() == [0, 1, *places, *range(192, 200)]


def test_the_length_of_a_key_plays_no_part() -> None:
    random = torch.Generator().manual_seed(1)
    keys = torch.randn(1, 100, 32, generator=random)
    kept = KeyDiff(budget=40).keep(view_of(keys))
    scaled = KeyDiff(budget=40).keep(view_of(keys * torch.rand(1, 100, 1, generator=random).add(0.5)))
    assert kept is not None and scaled is not None and torch.equal(kept[0], scaled[0])


def test_options_that_make_no_sense_are_refused() -> None:
    for wrong in ({}, {"budget": 0}, {"budget": 0.5, "window": -1}, {"budget": 0.5, "windows": 3}):
        with pytest.raises(ValidationError):
            KeyDiff.model_validate(wrong)
