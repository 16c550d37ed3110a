"""Reports on a comparison of long contexts: a table of at most 80 columns, Markdown, JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from quantkit.errors import QuantkitError
from quantkit.evaluate.long.result import LongResult
from quantkit.report.long_grids import TextGrid, grids
from quantkit.report.markdown import plain
from quantkit.report.table import WIDTH, columns, cut, fold

MOST = 36
"""Columns of the rows' names; a longer one has a line of its own."""


def table(result: LongResult) -> str:
    """The report as a table for the terminal."""
    out = [cut(f"{result.model} · {result.method}: KV settings at length", WIDTH), ""]
    for grid in grids(result):
        title = f"── {grid.title} "
        out.append(cut(title + "─" * (62 - columns(title)), WIDTH))
        for part in _fitting(grid):
            out += [*_lines(part), ""]
        for note in grid.notes:
            out[-1:] = [*fold(note), ""]
    for line in result.protocol.lines():
        out += fold(line)
    return "\n".join(out) + "\n"


def markdown(result: LongResult) -> str:
    """The report in Markdown."""
    out = [f"# {plain(result.model)} ({plain(result.method)}): KV settings at length", ""]
    for grid in grids(result):
        out += [f"## {plain(grid.title)}", "", "| " + " | ".join(map(plain, grid.heads)) + " |",
                "|---|" + "--:|" * (len(grid.heads) - 1)]
        out += ["| " + " | ".join(_marked(cell) for cell in row) + " |" for row in grid.rows]
        out += ["", *(f"{plain(note)}." for note in grid.notes), ""]
    return "\n".join([*out, "## Protocol", "", *(f"- {plain(line)}" for line in result.protocol.lines()), ""])


def _marked(cell: str) -> str:
    """Escaped; the spaces before a row's name that belongs to the row above would be dropped."""
    return ("&nbsp;&nbsp;" if cell.startswith("  ") else "") + plain(cell)


def as_json(result: LongResult) -> str:
    """One object: ``protocol``, ``settings``, ``full_cache_solves``, ``against_full_cache``, ``replies``,
    ``positions``, ``generated``."""
    return json.dumps(result.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


FILES: Mapping[str, Callable[[LongResult], str]] = {"report.md": markdown, "results.json": as_json}


def write(result: LongResult, folder: Path) -> list[Path]:
    """Write ``report.md`` and ``results.json``; each replaces an older one whole.

    Raises:
        QuantkitError: the folder can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, render in FILES.items():
            fresh = folder / f"{name}.new"
            try:
                fresh.write_text(render(result), encoding="utf-8")
                fresh.replace(folder / name)
            finally:
                with suppress(OSError):
                    fresh.unlink(missing_ok=True)
    except OSError as error:
        raise QuantkitError(f"the report can't be written to {folder}", why=error.strerror or str(error),
                            next="free some space, or choose another --out") from error
    return [folder / name for name in FILES]


def _fitting(grid: TextGrid) -> Iterator[TextGrid]:
    """The grid in parts that are narrow enough, each with the rows' names."""
    widths = _widths(grid)
    start = 1
    while start < len(widths):
        end, used = start, widths[0]
        while end < len(widths) and (end == start or used + 2 + widths[end] <= WIDTH):
            used += 2 + widths[end]
            end += 1
        yield TextGrid(grid.title, (grid.heads[0], *grid.heads[start:end]),
                       tuple((row[0], *row[start:end]) for row in grid.rows))
        start = end


def _lines(grid: TextGrid) -> Iterator[str]:
    widths = _widths(grid)
    for name, *cells in (grid.heads, *grid.rows):
        if columns(name) > MOST:
            yield from fold(name)
            name = ""
        right = (" " * (width - columns(cell)) + cell for cell, width in zip(cells, widths[1:]))
        yield cut("  ".join((name + " " * (widths[0] - columns(name)), *right)).rstrip(), WIDTH)


def _widths(grid: TextGrid) -> list[int]:
    lines: Sequence[Sequence[str]] = (grid.heads, *grid.rows)
    names = (columns(line[0]) for line in lines)
    return [max(width for width in names if width <= MOST),
            *(max(columns(line[index]) for line in lines) for index in range(1, len(grid.heads)))]
