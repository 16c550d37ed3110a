"""Where keys and values lie: the arguments that say so, and the addresses that they come to."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from quantkit_kernels.cpu.emit import Emitter
from quantkit_kernels.cpu.kv_codecs import CODECS, PAGE, PARTS, PageCodec
from quantkit_kernels.cpu.values import I32, I64, PTR, Value

FIELDS = ("table", "table_width", "lengths", "residual", "residual_width", "queries", "query_window",
          "starts", "count")
SEQUENCE = np.dtype([(name, np.int64) for name in FIELDS])
"""A sequence's record. ``table``: address of page numbers int32 ``[layers, heads, table_width]``;
``lengths``: of the slots held before this step int32 ``[layers, heads]``; ``residual``: of the numbers of
pages that wait; ``queries``: of kept queries float32 ``[layers, query_window, query heads, D]``, 0 if none
are kept; ``starts``: of the first slots that wait int32 ``[layers, heads]``; ``count``: tokens of this
step."""
CACHE = (*(f"*{side}_{part}" for side in "kv" for part in PARTS), "*k_residual", "*v_residual", "*positions",
         "*residual_positions", "*rows", "*sequences", "layer", "heads", "residual_length", "first")
"""Arguments that say where keys and values lie: the layer's pages; those of vectors that wait;
``rows`` int64 ``[M, 3]``: sequence, place in this step, position; ``sequences``: records of :data:`SEQUENCE`;
``positions``: null if a slot's number is its position; ``heads``: of keys; ``residual_length`` newest slots
wait, and the ``first``."""


@dataclass(frozen=True)
class PageCodecs:
    """How keys and values are stored.

    Attributes:
        residual: the codec in which the newest vectors wait in pages of their own: ``bf16``, ``f16`` or
            ``f32``; ``None``: none do.
    """

    keys: str
    values: str
    residual: str | None = None

    @property
    def name(self) -> str:
        both = self.keys if self.keys == self.values else f"{self.keys}_{self.values}"
        return both + (f"_residual_{self.residual}" if self.residual else "")

    @property
    def vectors(self) -> PageCodec:
        """The codec of residual vectors."""
        assert self.residual is not None
        return CODECS[self.residual]

    def side(self, side: str) -> PageCodec:
        return CODECS[self.keys if side == "k" else self.values]


class SequenceRecord:
    """Reads a sequence's record."""

    def __init__(self, e: Emitter, a: SimpleNamespace, sequence: Value) -> None:
        self._e = e
        self._record = a.sequences + sequence * SEQUENCE.itemsize

    def address(self, name: str) -> Value:
        return self._e.load(self._record, PTR, 8 * FIELDS.index(name))

    def number(self, name: str) -> Value:
        return self._e.load(self._record, I64, 8 * FIELDS.index(name))


class HeadPages:
    """A head's pages of a sequence.

    Args:
        e, a: the kernel and its arguments.
        codecs: how the pages are stored.
        dim: the head dimension.
        sequence, head: whose pages they are.

    Attributes:
        length: slots that it held before this step.
        count: the sequence's tokens of this step.
    """

    def __init__(self, e: Emitter, a: SimpleNamespace, codecs: PageCodecs, dim: int, sequence: Value,
                 head: Value) -> None:
        self._e, self._a, self._codecs, self._dim = e, a, codecs, dim
        record = SequenceRecord(e, a, sequence)
        index = a.layer * a.heads + head
        self._table = record.address("table") + index * record.number("table_width") * 4
        self.length = e.load(record.address("lengths") + index * 4, I32).sext(I64)
        if codecs.residual:
            self._residual = record.address("residual") + index * record.number("residual_width") * 4
            self._start = e.load(record.address("starts") + index * 4, I32).sext(I64)
        self.count = record.number("count")

    def border(self, length: Value) -> Value:
        """The slots in ``[first, border)`` are read as codes."""
        return self._e.max((length - self._a.residual_length) & -PAGE, self._a.first)

    @property
    def start(self) -> Value:
        """The first slot that waited before this step, but for those that always do."""
        return self._start

    def slot(self, at: Value) -> Value:
        """The place of a slot among all pages of codes."""
        return _place(self._e, self._table, at - self._a.first if self._codecs.residual else at)

    def residual(self, at: Value) -> Value:
        """The place of a slot among all pages of vectors that wait."""
        first = self._a.first
        return _place(self._e, self._residual, self._e.select(at < first, at, at - self._start + first))

    def parts(self, side: str, slot: Value) -> dict[str, Value]:
        """Pointers to what a slot of codes holds."""
        sizes = self._codecs.side(side).bytes(self._dim)
        return {name: getattr(self._a, f"{side}_{name}") + slot * size for name, size in sizes.items()}

    def shared(self, side: str, slot: Value) -> dict[str, Value]:
        """Pointers to what the slot's page holds beside its slots."""
        sizes, page = self._codecs.side(side).shared(self._dim), slot.shr(6)
        return {name: getattr(self._a, f"{side}_{name}") + page * size for name, size in sizes.items()}

    def vector(self, side: str, slot: Value) -> dict[str, Value]:
        """The same of a vector that waits."""
        size = self._codecs.vectors.bytes(self._dim)["values"]
        return {"values": getattr(self._a, f"{side}_residual") + slot * size}


def _place(e: Emitter, table: Value, index: Value) -> Value:
    page = e.load(table, I32, (index >> 6) * 4).sext(I64)
    return page * PAGE + (index & (PAGE - 1))
