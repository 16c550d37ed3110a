"""Embeddings: what a model's last layer leaves of a prompt, pooled into one vector."""

from __future__ import annotations

from typing import Literal

import torch

from quantkit.runtime.sampler import not_finite

Pooling = Literal["mean", "last"]
"""``mean``: of all tokens; ``last``: of the last token."""
_STEPS = 2.0**32
"""Sums are kept as whole numbers of steps of this fineness: they don't depend on their order."""
_LARGEST = 2.0**17


class Pooler:
    """Pools the normalized hidden states of a prompt that comes in chunks. How it was cut makes no
    difference.

    Args:
        pooling: how.
    """

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._sum: torch.Tensor | None = None
        self._count = 0

    def add(self, hidden: torch.Tensor) -> None:
        """Add a chunk's ``[n, hidden]``. Raises QuantkitError: it isn't finite."""
        rows = hidden[-1:] if self._pooling == "last" else hidden
        if not bool(torch.isfinite(rows).all()):
            raise not_finite()
        exact = (rows.double().clamp(-_LARGEST, _LARGEST) * _STEPS).round().long().sum(0)
        if self._sum is None or self._pooling == "last":
            self._sum, self._count = exact, len(rows)
        else:
            self._sum, self._count = self._sum + exact, self._count + len(rows)

    def clear(self) -> None:
        """Forget all chunks."""
        self._sum, self._count = None, 0

    def result(self) -> torch.Tensor:
        """float32 ``[hidden]``, not normalized."""
        assert self._sum is not None
        return (self._sum.double() / (_STEPS * self._count)).float().cpu()
