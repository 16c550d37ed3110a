"""What policies see of queries: the last ones themselves, and sums over all of them.

Queries are kept, never their weights: what a policy asks is worked out from them when it acts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SINKS = 4
"""Queries of the first positions are like no other, and say nothing about those to come."""


class QueryWindow:
    """The last queries of a sequence in every layer.

    Args:
        layers, size, heads, dim: how many, of how many heads.
        begin: the position of the first one to come.
        device: where.

    Attributes:
        size: how many positions' queries are kept.
        ring: float32 ``[layers, size, H, D]``, rotated and scaled; position p is in ``[:, p % size]``.
    """

    def __init__(self, layers: int, size: int, heads: int, dim: int, begin: int,
                 device: torch.device) -> None:
        self.size, self._begin = size, begin
        self.ring = torch.zeros(layers, size, heads, dim, device=device)

    def put(self, layer: int, q: torch.Tensor, end: int) -> None:
        """Keep ``q [H, n, D]``, the queries of the positions before ``end``."""
        some = q[:, -self.size:]
        at = torch.arange(end - some.shape[1], end, device=q.device) % self.size
        self.ring[layer, at] = some.transpose(0, 1).float()

    def last(self, layer: int, end: int, count: int) -> torch.Tensor:
        """float32 ``[H, n, D]``: of the positions before ``end`` at most so many that are here."""
        begin = max(self._begin, end - min(count, self.size))
        at = torch.arange(begin, end, device=self.ring.device) % self.size
        return self.ring[layer, at].transpose(0, 1)

    def copy(self) -> QueryWindow:
        """Another with the same queries."""
        layers, size, heads, dim = self.ring.shape
        made = QueryWindow(layers, size, heads, dim, self._begin, self.ring.device)
        made.ring.copy_(self.ring)
        return made


@dataclass
class QueryMoments:
    """Sums over queries before rotation, float64: ``count``, ``total [H, D]``, ``squares [H, D, D]``."""

    count: int
    total: torch.Tensor
    squares: torch.Tensor

    @classmethod
    def none(cls, heads: int, dim: int, device: torch.device) -> QueryMoments:
        """Of no query."""
        total = torch.zeros(heads, dim, dtype=torch.float64, device=device)
        return cls(0, total, total.new_zeros(heads, dim, dim))

    def add(self, q: torch.Tensor) -> None:
        """Queries ``[H, n, D]``."""
        some = q.double()
        self.count += q.shape[1]
        self.total += some.sum(1)
        self.squares += some.mT @ some

    @property
    def nbytes(self) -> int:
        """Of both sums."""
        return self.total.nbytes + self.squares.nbytes

    def mean(self) -> torch.Tensor:
        """float64 ``[H, D]``."""
        return self.total / self.count

    def covariance(self) -> torch.Tensor:
        """float64 ``[H, D, D]``."""
        mean = self.mean()
        return self.squares / self.count - mean[:, :, None] * mean[:, None]
