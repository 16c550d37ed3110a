"""Reports on a comparison of long contexts: a table of at most 80 columns, Markdown, JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from quantkit.evaluation.long.result import LongResult
from quantkit.evaluation.report.long_grids import grids
from quantkit.evaluation.report.markdown_tables import plain
from quantkit.evaluation.report.terminal import WIDTH, cut, fold, grid_lines, title_line
from quantkit.support.errors import QuantkitError


def table(result: LongResult) -> str:
    """The report as a table for the terminal."""
    out = [cut(f"{result.model} · {result.method}: KV settings at length", WIDTH), ""]
    for grid in grids(result):
        out += [title_line(grid.title), *grid_lines(grid)]
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
