"""Texts for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from unicodedata import combining, east_asian_width

from quantkit.evaluation.report.base import TextGrid

WIDTH = 80
_NAMES = 36
"""Columns of the rows' names; a longer one has a line of its own."""


def grid_lines(grid: TextGrid) -> list[str]:
    """A grid in parts that are narrow enough, each with an empty line behind; then its notes."""
    out: list[str] = []
    for part in fitting_parts(grid):
        out += [*part_lines(part), ""]
    for note in grid.notes:
        out[-1:] = [*fold(note), ""]
    return out


def title_line(text: str) -> str:
    title = f"── {text} "
    return cut(title + "─" * (62 - columns(title)), WIDTH)


def fitting_parts(grid: TextGrid) -> Iterator[TextGrid]:
    """The grid in parts that are narrow enough, each with the rows' names."""
    widths = _grid_widths(grid)
    start = 1
    while start < len(widths):
        end, used = start, widths[0]
        while end < len(widths) and (end == start or used + 2 + widths[end] <= WIDTH):
            used += 2 + widths[end]
            end += 1
        yield TextGrid(grid.title, (grid.heads[0], *grid.heads[start:end]),
                       tuple((row[0], *row[start:end]) for row in grid.rows))
        start = end


def part_lines(grid: TextGrid) -> Iterator[str]:
    widths = _grid_widths(grid)
    for name, *cells in (grid.heads, *grid.rows):
        if columns(name) > _NAMES:
            yield from fold(name)
            name = ""
        right = (" " * (width - columns(cell)) + cell for cell, width in zip(cells, widths[1:]))
        yield cut("  ".join((name + " " * (widths[0] - columns(name)), *right)).rstrip(), WIDTH)


def _grid_widths(grid: TextGrid) -> list[int]:
    lines: Sequence[Sequence[str]] = (grid.heads, *grid.rows)
    names = (columns(line[0]) for line in lines)
    return [max(width for width in names if width <= _NAMES),
            *(max(columns(line[index]) for line in lines) for index in range(1, len(grid.heads)))]


def safe(text: str) -> str:
    """On one line, and harmless for a terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


def cut(text: str, room: int, tail: bool = False) -> str:
    """At most ``room`` columns of a text, harmless for a terminal. ``tail`` keeps the end of it."""
    text = safe(text)
    if columns(text) <= room:
        return text
    while columns(text) > room - 1:
        text = text[1:] if tail else text[:-1]
    return f"…{text}" if tail else f"{text}…"


def columns(text: str) -> int:
    """Columns of a terminal: two for a wide character, none for a combining one."""
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def fold(text: str) -> list[str]:
    """Lines of at most :data:`WIDTH` columns, all but the first indented."""
    lines = [""]
    for word in text.split():
        while columns(lines[-1]) + columns(word) + (lines[-1].strip() != "") > WIDTH:
            if lines[-1].strip():
                lines.append("  ")
            else:  # a word that no line has room for
                head = cut(word, WIDTH - columns(lines[-1]))[:-1]
                lines, word = [*lines[:-1], lines[-1] + head, "  "], word[len(head):]
        lines[-1] += (" " if lines[-1].strip() else "") + word
    return [line for line in lines if line.strip()]
