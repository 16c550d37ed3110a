"""Tables in Markdown that a phone shows whole, and texts that are no markup."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from quantkit.evaluation.report.base import TextGrid

_MARKUP = re.compile(r"[\\`*_\[\]|#~]")
_COLUMNS, _LETTERS = 3, 20
"""Columns of a table beside the names, and letters of their longest words together: a phone shows no more."""
_WORD = 20
_FOLDED = 6
"""Rows of a table that are shown without being asked for."""
Column = tuple[str, list[str]]
"""A head and its cells, escaped."""


def plain(text: str) -> str:
    """``text`` with everything escaped that Markdown or HTML would take for markup."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(text.split())).replace("<", "&lt;")


def short(name: str) -> str:
    """A name that leaves room for numbers: words that can't be wrapped are cut; their ends differ more."""
    return plain(" ".join(word if len(word) <= _WORD else "…" + word[-_WORD + 1:] for word in name.split()))


def cell(value: str, below: str) -> str:
    """A value, and small below it what belongs to it."""
    return f"{value}<br><sub>{below}</sub>" if below else value


def table(title: str, names: Sequence[str], columns: Sequence[Column], align: str = "--:") -> list[str]:
    """One table, however wide."""
    lines = ["| " + " | ".join([title, *(top for top, _ in columns)]) + " |",
             "|---|" + f"{align}|" * len(columns)]
    lines += ["| " + " | ".join([name, *(cells[index] for _, cells in columns)]) + " |"
              for index, name in enumerate(names)]
    return [*lines, ""]


def tables(names: Sequence[str], columns: Sequence[Column], title: str = "variant") -> list[str]:
    """As many tables as it takes for none to be wide."""
    lines = []
    while columns:
        count = fitting(columns)
        lines += table(title, names, columns[:count])
        columns = columns[count:]
    return lines


def fitting(columns: Sequence[Column]) -> int:
    """How many of the first columns stand beside each other: one at least."""
    letters = 0
    for count, (title, cells) in enumerate(columns[:_COLUMNS]):
        texts = (text.partition("<br>")[0] for text in (title, *cells))
        letters += max(len(word) for text in texts for word in text.split() or [""])
        if count and letters > _LETTERS:
            return count
    return min(_COLUMNS, len(columns))


def grid_lines(grid: TextGrid | None, titled: bool = True) -> list[str]:
    """A grid under a bold title, in tables that are narrow enough, and its notes."""
    if grid is None:
        return []
    names = [short(row[0].partition("\n")[0]) for row in grid.rows]
    columns = [(_small(head), [_small(row[index]) for row in grid.rows])
               for index, head in enumerate(grid.heads) if index]
    folded = len(grid.rows) > _FOLDED
    lines = [f"**{plain(grid.title)}**", ""] if titled and not folded else []
    if folded:
        lines += [f"<details><summary>{escape(' '.join(grid.title.split()))}: "
                  f"{len(grid.rows)} rows</summary>", ""]
    lines += tables(names, columns, plain(grid.heads[0]))
    lines += ["</details>", ""] * folded
    for note in grid.notes:
        lines += [plain(note) + "." * (not note.endswith(".")), ""]
    return lines


def _small(text: str) -> str:
    value, _, below = text.partition("\n")
    return cell(plain(value), ", ".join(map(plain, below.splitlines())))
