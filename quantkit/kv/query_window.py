"""What is kept of queries: the last ones themselves, and moments over all of them.

Queries are kept rather than their attention weights: what a policy needs is computed from them when it acts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SINKS = 4
"""Queries of the first positions are unlike all others and say nothing about those to come."""


class QueryWindow:
    """The last queries of a sequence in every layer (SnapKV's observation window).

    Args:
        layers, size, heads, dim: number of layers, of positions that are kept, of query heads; head
            dimension.
        begin: the position of the first query that will come.
        device: the device of the queries.

    Attributes:
        size: the number of positions whose queries are kept.
        ring: float32 ``[layers, size, H, D]``, rotated and scaled; position p is at ``[:, p % size]``.
    """

    def __init__(self, layers: int, size: int, heads: int, dim: int, begin: int,
                 device: torch.device) -> None:
        self.size, self._begin = size, begin
        self.ring = torch.zeros(layers, size, heads, dim, device=device)

    def put(self, layer: int, queries: torch.Tensor, end: int) -> None:
        """Keep ``queries [H, n, D]``, those of the positions before ``end``."""
        kept = queries[:, -self.size:]
        index = torch.arange(end - kept.shape[1], end, device=queries.device) % self.size
        self.ring[layer, index] = kept.transpose(0, 1).float()

    def last(self, layer: int, end: int, count: int) -> torch.Tensor:
        """The queries of at most ``count`` positions before ``end``, as far as they are kept: float32
        ``[H, n, D]``."""
        begin = max(self._begin, end - min(count, self.size))
        index = torch.arange(begin, end, device=self.ring.device) % self.size
        return self.ring[layer, index].transpose(0, 1)

    def copy(self) -> QueryWindow:
        """An independent copy."""
        shape = self.ring.shape
        window = QueryWindow(shape[0], shape[1], shape[2], shape[3], self._begin, self.ring.device)
        window.ring.copy_(self.ring)
        return window


@dataclass
class QueryMoments:
    """Sums over queries before RoPE, float64: ``count``, ``total [H, D]``, ``squares [H, D, D]``."""

    count: int
    total: torch.Tensor
    squares: torch.Tensor

    @classmethod
    def none(cls, heads: int, dim: int, device: torch.device) -> QueryMoments:
        """The moments of no query."""
        total = torch.zeros(heads, dim, dtype=torch.float64, device=device)
        return cls(0, total, total.new_zeros(heads, dim, dim))

    def add(self, queries: torch.Tensor) -> None:
        """Add ``queries [H, n, D]``."""
        exact = queries.double()
        self.count += queries.shape[1]
        self.total += exact.sum(1)
        self.squares += exact.mT @ exact

    @property
    def nbytes(self) -> int:
        """Bytes of both sums."""
        return self.total.nbytes + self.squares.nbytes

    def mean(self) -> torch.Tensor:
        """float64 ``[H, D]``."""
        return self.total / self.count

    def covariance(self) -> torch.Tensor:
        """float64 ``[H, D, D]``."""
        mean = self.mean()
        return self.squares / self.count - mean[:, :, None] * mean[:, None]
