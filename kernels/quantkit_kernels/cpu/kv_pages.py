"""Where keys and values lie: the arguments that say so, and the addresses that they come to."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from quantkit_kernels.cpu.emit import Emitter
from quantkit_kernels.cpu.kv_codecs import CODECS, PAGE, PARTS, PageCodec
from quantkit_kernels.cpu.values import I32, I64, PTR, Value

SEQUENCE = 9
"""Words of a sequence's record."""
CACHE = (*(f"*{side}_{part}" for side in "kv" for part in PARTS), "*k_residual", "*v_residual", "*positions",
         "*residual_positions", "*rows", "*sequences", "layer", "heads", "residual_length", "first")
"""Arguments that say where keys and values lie: the layer's pages; those of vectors that wait;
``rows`` int64 ``[M, 3]``: sequence, place in this step, position; ``sequences`` int64 ``[B, 9]``: pointer to
page numbers int32 ``[layers, heads, width]``, width, pointer to slots held before this step int32
``[layers, heads]``, pointer to numbers of pages that wait and their width, pointer to kept queries float32
``[layers, kept, query heads, D]`` (null: none are) and how many positions' are kept, pointer to the first
slots that wait int32 ``[layers, heads]``, tokens of this step;
``positions``: null if a slot's number is its position; ``heads``: of keys; ``residual_length`` newest slots
wait, and the ``first``."""


@dataclass(frozen=True)
class PageCodecs:
    """Of keys and of values.

    Attributes:
        residual: the codec in which the newest vectors wait in pages of their own: ``bf16``, ``f16`` or
            ``f32``; ``None``: none do.
    """

    keys: str
    values: str
    residual: str | None = None

    @property
    def name(self) -> str:
        """The codecs' part of a function's name."""
        both = self.keys if self.keys == self.values else f"{self.keys}_{self.values}"
        return both + (f"_residual_{self.residual}" if self.residual else "")

    @property
    def vectors(self) -> PageCodec:
        """The codec of residual vectors."""
        assert self.residual is not None
        return CODECS[self.residual]

    def side(self, side: str) -> PageCodec:
        """``k`` or ``v``."""
        return CODECS[self.keys if side == "k" else self.values]


class HeadPages:
    """A head's pages of a sequence.

    Args:
        e, a: the kernel and its arguments.
        codecs: of the pages.
        dim: of a head.
        sequence, head: whose.

    Attributes:
        length: slots that it held before this step.
        count: the sequence's tokens of this step.
    """

    def __init__(self, e: Emitter, a: SimpleNamespace, codecs: PageCodecs, dim: int, sequence: Value,
                 head: Value) -> None:
        self._e, self._a, self._codecs, self._dim = e, a, codecs, dim
        record, index = a.sequences + sequence * (8 * SEQUENCE), a.layer * a.heads + head
        self._table = e.load(record, PTR) + index * e.load(record, I64, 8) * 4
        self.length = e.load(e.load(record, PTR, 16) + index * 4, I32).sext(I64)
        if codecs.residual:
            self._residual = e.load(record, PTR, 24) + index * e.load(record, I64, 32) * 4
            self._start = e.load(e.load(record, PTR, 56) + index * 4, I32).sext(I64)
        self.count = e.load(record, I64, 64)

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
