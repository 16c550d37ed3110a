"""Page tables, lengths and positions on the device, where they stay from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from quantkit.kv.base import PAGE
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.sequence import PageTable, SequenceState
from quantkit.ops import gpu
from quantkit.runtime.memory.kv import LOOKAHEAD
from quantkit.runtime.memory.scratch import TABLE_WIDTH, residual_table_size, table_size
from quantkit.runtime.program_model import RowSlice

if TYPE_CHECKING:
    from quantkit_kernels.triton.cache import SequenceTables

ROWS = 16
"""Sequences for which there is room at first."""


@dataclass
class _Row:
    """A sequence on the device.

    Attributes:
        index: its row of the tables.
        table: the page numbers that the device has.
        seen: tokens that it has counted there.
    """

    index: int
    table: PageTable | None = None
    seen: int = -1


class DeviceTables:
    """What kernels are told of a cache's sequences.

    The host's bookkeeping is the truth. A sequence whose pages changed is copied to the device again before
    its next step, one that only got tokens in a way that the device hasn't counted has its lengths copied.

    Attributes:
        tables: the tables that kernels take.
        moves: how often they came to lie elsewhere.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._rows: dict[int, _Row] = {}
        self.moves = 0
        self.tables = self._made(ROWS, TABLE_WIDTH, TABLE_WIDTH)

    def make_room(self, sequences: int, tokens: int) -> None:
        """Make the tables large enough for this number of sequences, each of this number of tokens."""
        width = table_size(-(-tokens // PAGE))
        waiting = residual_table_size(self._cache) if self._cache.has_residual else TABLE_WIDTH
        self.tables = self._made(table_size(sequences + 1), width, waiting)
        self.moves += 1
        for row in self._rows.values():
            row.table = None

    def place(self, numbers: Sequence[int], states: Sequence[SequenceState],
              counts: Sequence[int]) -> list[int]:
        """Reserve pages for a step's tokens. Returns the device's rows of these sequences."""
        for state, count in zip(states, counts, strict=True):
            if state.table is None or state.free_slots < count or state.query_window is not None:
                self._cache.reserve(state, count)
        if not all(number in self._rows and self._rows[number].table is state.table
                   for number, state in zip(numbers, states)):
            self._make_room(numbers, states)
        rows = []
        for number, state in zip(numbers, states):
            row = self._rows[number]
            if row.table is not state.table:
                self._copy(row, state)
            elif row.seen != state.seen[-1]:
                self._count(row, state)
            rows.append(row.index)
        return rows

    def counted(self, batch: Batch, slices: Sequence[RowSlice]) -> None:
        """The device has counted these tokens; so does the host now, and prepares for more while the device
        computes."""
        for part in slices:
            state = batch.sequences[part.sequence]
            self._rows[batch.numbers[part.sequence]].seen += part.count
            batch.advance(part.sequence, part.count)
            if state.table is None or state.free_slots < 1:
                more = min(LOOKAHEAD, state.max_length - int(state.seen[-1]))
                if more > 0:
                    self._cache.reserve(state, more)

    def _make_room(self, numbers: Sequence[int], states: Sequence[SequenceState]) -> None:
        """Rows for new sequences, and room for the longest tables."""
        tables = self.tables
        missing = [number for number in numbers if number not in self._rows]
        rows, width, residual_width = tables.pages.shape[0], tables.pages.shape[3], 0
        if missing:
            alive = set(self._cache.numbers)
            self._rows = {number: row for number, row in self._rows.items() if number in alive}
            while len(self._rows) + len(missing) > rows:
                rows *= 2
            taken = {row.index for row in self._rows.values()}
            free = iter(index for index in range(rows) if index not in taken)
            self._rows |= {number: _Row(next(free)) for number in missing}
        for state in states:
            assert state.table is not None and state.residual is not None
            width, residual_width = max(width, state.table.shape[2]), max(residual_width,
                                                                          state.residual.shape[2])
        before = 0 if tables.residual is None else tables.residual.shape[3]
        if rows > tables.pages.shape[0] or width > tables.pages.shape[3] or residual_width > before:
            self.tables = self._made(rows, table_size(width), table_size(max(residual_width, before)))
            self.moves += 1
            for row in self._rows.values():
                row.table = None

    def _made(self, rows: int, width: int, residual_width: int) -> SequenceTables:
        """Sizes of the tables: sequences, pages of codes and pages of residual vectors."""
        from quantkit_kernels.triton.cache import SequenceTables

        cache = self._cache
        shape = (rows, len(cache.layers), cache.heads)

        def zeros(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=cache.device)

        residual = starts = None
        if cache.has_residual:
            residual, starts = zeros(*shape, max(residual_width, TABLE_WIDTH)), zeros(*shape)
        return SequenceTables(zeros(*shape, width), zeros(*shape), zeros(rows), residual, starts,
                              cache.codecs.residual_length, cache.codecs.first)

    def _copy(self, row: _Row, state: SequenceState) -> None:
        """Copy everything that the host knows of a sequence."""
        tables = self.tables
        assert state.table is not None and state.residual is not None
        tables.pages[row.index, :, :, :state.table.shape[2]] = self._sent(state.table)
        if tables.residual is not None and tables.starts is not None:
            tables.residual[row.index, :, :, :state.residual.shape[2]] = self._sent(state.residual)
            tables.starts[row.index] = self._sent(state.starts)
        self._count(row, state)
        row.table = state.table

    def _count(self, row: _Row, state: SequenceState) -> None:
        self.tables.lengths[row.index] = self._sent(state.lengths)
        row.seen = int(state.seen[-1])
        self.tables.seen[row.index] = row.seen

    def _sent(self, values: np.ndarray) -> torch.Tensor:
        """Copy to the device without waiting; the host continues to count in the original."""
        return gpu.sent(torch.tensor(values, dtype=torch.int32), self._cache.device)
