"""What a policy sees, made by hand."""

from __future__ import annotations

import pytest
import torch

from quantkit.kv.base import Held


@pytest.fixture
def held():
    """``held(positions, seen, weights)``; what isn't given may not be asked for."""
    def make(positions: torch.Tensor, seen: int | None = None, weights: torch.Tensor | None = None) -> Held:
        def refuse() -> torch.Tensor:
            raise AssertionError("the policy asked for what it doesn't need")

        return Held((positions.shape[1],) * positions.shape[0], seen or int(positions.max()) + 1,
                    lambda: positions, refuse, refuse if weights is None else lambda: weights)
    return make
