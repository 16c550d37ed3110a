"""A table as texts, which each report writes in its own way."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class TextGrid:
    """A table.

    Attributes:
        title: above it.
        heads: of all columns; the first has the rows' names. What follows a line break is small: a unit.
        rows: their cells. What follows a line break is small: an interval.
        notes: sentences below it.
        dimmed: indices of rows that recede, because others are better in everything.
    """

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    dimmed: frozenset[int] = field(default_factory=frozenset)

    @property
    def filled(self) -> TextGrid:
        """Without columns that have no value, the first aside."""
        kept = [index for index in range(len(self.heads))
                if not index or any(row[index] not in ("", "–") for row in self.rows)]
        return TextGrid(self.title, tuple(self.heads[index] for index in kept),
                        tuple(tuple(row[index] for index in kept) for row in self.rows),
                        self.notes, self.dimmed)


def pair(value: str, below: str = "") -> str:
    """A cell: a value, and what stands small below it."""
    return f"{value}\n{below}" if below else value
