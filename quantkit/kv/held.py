"""What the cache knows of a sequence: its pages, and how many slots of them it has filled."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from quantkit.kv.pages import PAGE


class HeldLayer:
    """What the cache knows of one sequence in one layer.

    Attributes:
        pages: of each key head, in the order of its slots.
        lengths: slots that each head holds, int32 ``[Hkv]``; a row of the sequence's own.
        steps: decode steps so far.
        queries: the last rotated queries, ``[H, w, D]``, if the policy wants any.
    """

    __slots__ = ("_index", "_owner", "lengths", "pages", "queries", "steps", "table")

    def __init__(self, owner: HeldSequence, index: int) -> None:
        self._owner, self._index, self.lengths = owner, index, owner.lengths[index]
        self.pages: list[list[int]] = [[] for _ in self.lengths]
        self.steps = 0
        self.queries: torch.Tensor | None = None
        self.table: torch.Tensor | None = None

    @property
    def seen(self) -> int:
        """Tokens that it had, dropped ones included: the next one's position."""
        return int(self._owner.seen[self._index])

    @seen.setter
    def seen(self, count: int) -> None:
        self._owner.seen[self._index] = count

    def advance(self, count: int) -> None:
        """So many tokens are in this layer's pages now; the sequence's table is to be laid out anew."""
        self.lengths += count
        self.seen += count
        self._owner.table = None

    def moved(self) -> None:
        """Its pages are others now."""
        self.table = self._owner.table = None


class HeldSequence:
    """A sequence in all layers.

    Attributes:
        extent: tokens that it was announced to have in the end; 0: few.
        layers: one by one.
        lengths: int32 ``[layers, Hkv]``.
        seen: tokens that each layer had, int64 ``[layers]``.
        table: page numbers int32 ``[layers, Hkv, width]``; ``None`` until somebody asks.
        room: tokens that fit before a page is missing, where there is a table.
        where: addresses of table and lengths, the table's width between them, where there is a table.
    """

    def __init__(self, layers: int, heads: int, extent: int = 0) -> None:
        self.extent = extent
        self.lengths = np.zeros((layers, heads), np.int32)
        self.seen = np.zeros(layers, np.int64)
        self.layers = [HeldLayer(self, index) for index in range(layers)]
        self.table: npt.NDArray[np.int32] | None = None
        self.room = 0
        self.where = 0, 0, 0

    def lay_out(self) -> None:
        """Make the table if there is none."""
        if self.table is not None:
            return
        width = max(len(pages) for layer in self.layers for pages in layer.pages)
        self.table = np.zeros((*self.lengths.shape, width), np.int32)
        for rows, layer in zip(self.table, self.layers):
            for row, pages in zip(rows, layer.pages):
                row[:len(pages)] = pages
        held = np.array([[len(pages) for pages in layer.pages] for layer in self.layers]) * PAGE
        self.room = int((held - self.lengths).min())
        self.where = self.table.ctypes.data, width, self.lengths.ctypes.data

    def advance(self, count: int) -> None:
        """So many tokens are in its pages now."""
        self.lengths += count
        self.seen += count
        self.room -= count
