"""What a policy sees, made by hand."""

from __future__ import annotations

import pytest
import torch

from quantkit.kv.base import PolicyView


@pytest.fixture
def held():
    """``held(positions, seen, window_attention=…)``; what isn't given may not be asked for."""
    def make(positions: torch.Tensor, seen: int | None = None, *, prompt: int | None = None, layer: int = 0,
             layers: int = 1, **given: torch.Tensor) -> PolicyView:
        def answer(name: str):
            def refuse(*_: object) -> torch.Tensor:
                raise AssertionError(f"the policy asked for {name}, which it doesn't need")

            return (lambda *_: given[name]) if name in given else refuse

        seen = int(positions.max()) + 1 if seen is None else seen
        lengths = tuple((positions >= 0).sum(1).tolist())
        return PolicyView(layer, layers, lengths, seen, seen if prompt is None else prompt, lambda: positions,
                          *map(answer, ("keys", "values", "window_attention", "attention_received",
                                        "future_queries")))
    return make
