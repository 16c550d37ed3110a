"""What the cache knows of a sequence: its pages, how many of their slots are filled, and tracked queries.

Queries are kept rather than their attention weights: what a policy needs is computed from them when it acts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quantkit.kv.base import PAGE, KVCodecs

PageTable = npt.NDArray[np.int32]


class LayerState:
    """One sequence in one layer.

    Attributes:
        pages: page numbers of each KV head, in the order of its slots.
        residual: page numbers of each KV head for the pages of unencoded slots: first those of slots that are
            never encoded,
            then those from slot ``starts[head]`` on.
        lengths: slots that each head holds, int32 ``[Hkv]``; a row of the sequence's array, as ``starts`` is.
        steps: decode steps so far.
        prompt: tokens at the end of the sequence's prompt.
        accumulated: tokens whose queries are in ``attention_received`` and ``query_moments``.
        attention_received: the tensor of :attr:`quantkit.kv.base.PolicyView.attention_received` for the slots
            that
            there were when it was accumulated.
        query_moments: the moments of all queries, if the policy tracks them.
        tables: ``pages`` and ``residual`` as int64 ``[Hkv, n]``, cached once they were asked for.
    """

    __slots__ = ("_index", "_sequence", "accumulated", "attention_received", "lengths", "pages", "prompt",
                 "query_moments", "residual", "starts", "steps", "tables")

    def __init__(self, sequence: SequenceState, index: int) -> None:
        self._sequence, self._index = sequence, index
        self.lengths, self.starts = sequence.lengths[index], sequence.starts[index]
        self.pages: list[list[int]] = [[] for _ in self.lengths]
        self.residual: list[list[int]] = [[] for _ in self.lengths]
        self.steps = self.prompt = self.accumulated = 0
        self.attention_received: torch.Tensor | None = None
        self.query_moments: QueryMoments | None = None
        self.tables: dict[str, torch.Tensor] = {}

    def max_lengths(self) -> torch.Tensor:
        """The final length that the sequence was announced with, int64 ``[1]``: longrope depends on it."""
        return torch.tensor([self._sequence.max_length])

    @property
    def query_window(self) -> QueryWindow:
        """The sequence's last queries. There are none unless the policy tracks queries."""
        assert self._sequence.query_window is not None
        return self._sequence.query_window

    @property
    def seen(self) -> int:
        """Tokens of the sequence so far, dropped ones included: the next token's position."""
        return int(self._sequence.seen[self._index])

    @seen.setter
    def seen(self, count: int) -> None:
        self._sequence.seen[self._index] = count

    def advance(self, count: int) -> None:
        """Note that ``count`` more tokens are in this layer's pages; the sequence's tables become stale."""
        self.lengths += count
        self.seen += count
        self._sequence.table = None

    def pages_changed(self) -> None:
        """Forget the tables: the layer has other pages now."""
        self.tables = {}
        self._sequence.table = None


class SequenceState:
    """One sequence in all layers.

    Attributes:
        max_length: the final length that it was announced with, in tokens; 0: short.
        first: slots at the beginning that are never encoded.
        layers: its state in each layer.
        lengths, starts: int32 ``[layers, Hkv]``.
        seen: tokens that each layer has had, int64 ``[layers]``.
        table, residual: page numbers int32 ``[layers, Hkv, width]``; ``None`` until they are laid out.
        query_window: the last queries, while a policy tracks them.
        free_slots: tokens that fit before a page is missing, where there is a table.
    """

    def __init__(self, layers: int, heads: int, max_length: int = 0, first: int = 0) -> None:
        self.max_length, self.first = max_length, first
        self.lengths, self.starts = (np.full((layers, heads), value, np.int32) for value in (0, first))
        self.seen = np.zeros(layers, np.int64)
        self.layers = [LayerState(self, index) for index in range(layers)]
        self.table: PageTable | None = None
        self.residual: PageTable | None = None
        self.query_window: QueryWindow | None = None
        self.free_slots = 0
        self._record: npt.NDArray[np.void] | None = None

    @property
    def tracked_bytes(self) -> int:
        """Bytes of kept queries and of what is accumulated over them."""
        total = 0 if self.query_window is None else self.query_window.ring.nbytes
        for layer in self.layers:
            total += 0 if layer.attention_received is None else layer.attention_received.nbytes
            total += 0 if layer.query_moments is None else layer.query_moments.nbytes
        return total

    def lay_out(self, residual_length: int | None) -> None:
        """Make the tables if there are none.

        Args:
            residual_length: this many of the newest slots stay unencoded; ``None``: there is no residual.
        """
        if self.table is not None:
            return
        self.table = _table([layer.pages for layer in self.layers])
        self.residual = _table([layer.residual for layer in self.layers])
        coded, residual = (PAGE * np.array([[*map(len, heads)] for heads in pages]) for pages in (
            [layer.pages for layer in self.layers], [layer.residual for layer in self.layers]))
        free = coded - self.lengths if residual_length is None else np.minimum(
            coded + (self.first + PAGE - 1 + residual_length) - self.lengths,
            self.starts - self.first + residual - self.lengths)
        self.free_slots = int(free.min())
        self._record = None

    @property
    def record(self) -> npt.NDArray[np.void]:
        """The sequence as the CPU's kernels read it, but for a step's tokens; there is a table."""
        from quantkit_kernels.cpu.kv_pages import SEQUENCE

        if self._record is None:
            assert self.table is not None and self.residual is not None
            record = np.zeros((), SEQUENCE)
            record["table"] = self.table.ctypes.data
            record["table_width"] = self.table.shape[2]
            record["lengths"] = self.lengths.ctypes.data
            record["residual"] = self.residual.ctypes.data
            record["residual_width"] = self.residual.shape[2]
            record["starts"] = self.starts.ctypes.data
            if self.query_window is not None:
                record["queries"] = self.query_window.ring.data_ptr()
                record["query_window"] = self.query_window.size
            self._record = record
        return self._record

    def track(self, window: QueryWindow | None) -> None:
        """Keep queries in ``window`` from now on (``None``: keep none) and forget what was accumulated."""
        self.query_window, self.table = window, None
        for layer in self.layers:
            layer.accumulated = layer.seen
            layer.attention_received = None
            layer.query_moments = None

    def pages_to_encode(self, codecs: KVCodecs, count: int) -> int:
        """Pages of a head that are to be encoded when ``count`` more tokens come, at most."""
        ends = np.maximum((self.lengths + (count - codecs.residual_length)) & -PAGE, codecs.first)
        return int((ends - self.starts).max()) // PAGE

    def has_stale_residual(self, residual_length: int) -> bool:
        """Whether the residual still holds pages whose vectors have been encoded."""
        return bool((self.lengths - residual_length - PAGE >= self.starts).any())

    def advance(self, count: int) -> None:
        """Note that ``count`` more tokens are in the pages of all layers."""
        self.lengths += count
        self.seen += count
        self.free_slots -= count


SINKS = 4
"""Queries of the first positions are unlike all others and say nothing about those to come."""


class QueryWindow:
    """The last queries of a sequence in every layer (SnapKV's observation window).

    Args:
        layers, size, heads, dim: number of layers, of positions that are kept, of query heads; head
            dimension.
        begin: the position of the first query that will come.

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
        return self.total.nbytes + self.squares.nbytes

    def mean(self) -> torch.Tensor:
        """float64 ``[H, D]``."""
        return self.total / self.count

    def covariance(self) -> torch.Tensor:
        """float64 ``[H, D, D]``."""
        mean = self.mean()
        return self.squares / self.count - mean[:, :, None] * mean[:, None]


def _table(layers: Sequence[Sequence[Sequence[int]]]) -> PageTable:
    """Page numbers as an array, filled up with 0."""
    rows = [pages for heads in layers for pages in heads]
    sizes = set(map(len, rows))
    width = max(sizes)
    if len(sizes) == 1:
        return np.array(rows, np.int32).reshape(len(layers), len(layers[0]), width)
    table = np.zeros((len(rows), width), np.int32)
    for row, pages in zip(table, rows):
        row[:len(pages)] = pages
    return table.reshape(len(layers), len(layers[0]), width)
