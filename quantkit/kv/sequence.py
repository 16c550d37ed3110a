"""What the cache knows of a sequence: its pages, and how many slots of them it has filled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from quantkit.kv.base import PAGE, KVCodecs
from quantkit.kv.query_window import QueryMoments, QueryWindow

PageTable = npt.NDArray[np.int32]


class LayerState:
    """What the cache knows of one sequence in one layer.

    Attributes:
        pages: of each key head, in the order of its slots.
        residual: of each key head, pages of slots that aren't encoded: the first ones of all, if they never
            are, and those from slot ``starts[head]`` on.
        lengths: slots that each head holds, int32 ``[Hkv]``; a row of the sequence's own, as ``starts`` is.
        steps: decode steps so far.
        prompt: tokens that it had at its prompt's end.
        absorbed: tokens whose queries are in ``sums`` and ``moments``.
        sums: see :attr:`quantkit.kv.base.PolicyView.sums`, of the slots that there were then.
        moments: of all queries, if the policy wants to know.
        tables: ``pages`` and ``residual`` as int64 ``[Hkv, n]``, where somebody asked for them.
    """

    __slots__ = (
        "_index",
        "_owner",
        "absorbed",
        "lengths",
        "moments",
        "pages",
        "prompt",
        "residual",
        "starts",
        "steps",
        "sums",
        "tables",
    )

    def __init__(self, owner: SequenceState, index: int) -> None:
        self._owner, self._index = owner, index
        self.lengths, self.starts = owner.lengths[index], owner.starts[index]
        self.pages: list[list[int]] = [[] for _ in self.lengths]
        self.residual: list[list[int]] = [[] for _ in self.lengths]
        self.steps = self.prompt = self.absorbed = 0
        self.sums: torch.Tensor | None = None
        self.moments: QueryMoments | None = None
        self.tables: dict[str, torch.Tensor] = {}

    def max_lengths(self) -> torch.Tensor:
        """How many tokens the sequence was announced to have, int64 ``[1]``: longrope asks."""
        return torch.tensor([self._owner.max_length])

    @property
    def asked(self) -> QueryWindow:
        """The sequence's last queries; there are none unless the policy listens."""
        assert self._owner.asked is not None
        return self._owner.asked

    @property
    def seen(self) -> int:
        """Tokens that it had, dropped ones included: the next one's position."""
        return int(self._owner.seen[self._index])

    @seen.setter
    def seen(self, count: int) -> None:
        self._owner.seen[self._index] = count

    def advance(self, count: int) -> None:
        """So many tokens are in this layer's pages now; the sequence's tables are to be laid out anew."""
        self.lengths += count
        self.seen += count
        self._owner.table = None

    def moved(self) -> None:
        """Its pages are others now."""
        self.tables = {}
        self._owner.table = None


class SequenceState:
    """A sequence in all layers.

    Attributes:
        max_length: tokens that it was announced to have in the end; 0: few.
        first: slots that are never encoded.
        layers: one by one.
        lengths, starts: int32 ``[layers, Hkv]``.
        seen: tokens that each layer had, int64 ``[layers]``.
        table, residual: page numbers int32 ``[layers, Hkv, width]``; ``None`` until somebody asks.
        asked: the last queries, while a policy listens.
        tokens: the prompt's, if the policy wants it fed again.
        room: tokens that fit before a page is missing, where there is a table.
        where: addresses of table, lengths, waiting and queries, each table's width behind it, and how many
            queries are kept, where there is one.
    """

    def __init__(self, layers: int, heads: int, max_length: int = 0, first: int = 0) -> None:
        self.max_length, self.first = max_length, first
        self.lengths, self.starts = (np.full((layers, heads), at, np.int32) for at in (0, first))
        self.seen = np.zeros(layers, np.int64)
        self.layers = [LayerState(self, index) for index in range(layers)]
        self.table: PageTable | None = None
        self.residual: PageTable | None = None
        self.asked: QueryWindow | None = None
        self.tokens: list[int] = []
        self.room = 0
        self.where = 0, 0, 0, 0, 0, 0, 0

    @property
    def watched_bytes(self) -> int:
        """Bytes of queries and of sums over them."""
        found = 0 if (asked := self.asked) is None else asked.ring.nbytes
        for layer in self.layers:
            found += 0 if (sums := layer.sums) is None else sums.nbytes
            found += 0 if (moments := layer.moments) is None else moments.nbytes
        return found

    def lay_out(self, residual_length: int | None) -> None:
        """Make the tables if there are none.

        Args:
            residual_length: the newest slots that wait; ``None``: none ever does.
        """
        if self.table is not None:
            return
        self.table = _table([layer.pages for layer in self.layers])
        self.residual = _table([layer.residual for layer in self.layers])
        held, waits = (PAGE * np.array([[*map(len, rows)] for rows in pages]) for pages in (
            [layer.pages for layer in self.layers], [layer.residual for layer in self.layers]))
        room = held - self.lengths if residual_length is None else np.minimum(
            held + (self.first + PAGE - 1 + residual_length) - self.lengths,
            self.starts - self.first + waits - self.lengths)
        self.room = int(room.min())
        self.where = (self.table.ctypes.data, self.table.shape[2], self.lengths.ctypes.data,
                      self.residual.ctypes.data, self.residual.shape[2],
                      *((0, 0) if self.asked is None else (self.asked.ring.data_ptr(), self.asked.size)))

    def start_tracking(self, asked: QueryWindow | None) -> None:
        """Keep the queries from now on there, or none; what was summed up before is forgotten."""
        self.asked, self.table = asked, None
        for layer in self.layers:
            layer.absorbed, layer.sums, layer.moments = layer.seen, None, None

    def closing(self, codings: KVCodecs, count: int) -> int:
        """Pages of a head that are to be encoded with so many more tokens, at most."""
        ends = np.maximum((self.lengths + (count - codings.residual_length)) & -PAGE, codings.first)
        return int((ends - self.starts).max()) // PAGE

    def behind(self, residual_length: int) -> bool:
        """Whether vectors wait that are codes by now."""
        return bool((self.lengths - residual_length - PAGE >= self.starts).any())

    def advance(self, count: int) -> None:
        """So many tokens are in its pages now."""
        self.lengths += count
        self.seen += count
        self.room -= count


def _table(layers: Sequence[Sequence[Sequence[int]]]) -> PageTable:
    """Page numbers, filled up with 0."""
    flat = [pages for heads in layers for pages in heads]
    sizes = set(map(len, flat))
    width = max(sizes)
    if len(sizes) == 1:
        return np.array(flat, np.int32).reshape(len(layers), len(layers[0]), width)
    table = np.zeros((len(flat), width), np.int32)
    for row, pages in zip(table, flat):
        row[:len(pages)] = pages
    return table.reshape(len(layers), len(layers[0]), width)
