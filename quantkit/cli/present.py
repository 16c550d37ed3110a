"""Prints errors and notes on stderr, and tables of at most a terminal's width on stdout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import click

MIN_WIDTH = 80
Row = TypeVar("Row")


def show_error(what: str, why: str | None = None, next: str | None = None) -> None:
    """``error: what``, ``why: …``, ``next: …`` on stderr, colored when that is a terminal."""
    for label, color, text in (("error", "red", what), ("why", "yellow", why), ("next", "green", next)):
        if text:
            indent = "\n" + " " * (len(label) + 2)
            click.echo(click.style(f"{label}:", fg=color, bold=True) + " "
                       + text.strip().replace("\n", indent), err=True)


def show_warning(text: str) -> None:
    click.echo(click.style("warning:", fg="yellow", bold=True) + " " + " ".join(text.split()), err=True)


def note(text: str = "") -> None:
    """Talk: a line on stderr, so that stdout holds data only."""
    click.echo(text, err=True)


def print_json(data: Any) -> None:
    """One JSON value on stdout; NaN and infinity are refused."""
    click.echo(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False))


def width() -> int:
    """Columns of the terminal; 80 where there is none or it is narrower."""
    return max(MIN_WIDTH, shutil.get_terminal_size((MIN_WIDTH, 24)).columns)


def table(headers: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[int] = (),
          shrink: int = 0, limit: int | None = None) -> str:
    """Aligned columns, one space at least between them.

    Args:
        headers, rows: the texts.
        right: indices of the columns that are aligned to the right.
        shrink: index of the column that is cut from the left (``…``) when a line is too long.
        limit: longest line; by default :func:`width`.
    """
    lines = [[str(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]
    room = limit or width()
    gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= room else 1
    over = sum(widths) + gap * (len(widths) - 1) - room
    if over > 0:
        widths[shrink] = max(4, widths[shrink] - over)
    out = []
    for line in lines:
        line[shrink] = cut(line[shrink], widths[shrink])
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths))]
        out.append((" " * gap).join(cells).rstrip())
    return "\n".join(out)


def cut(text: str, room: int) -> str:
    """The last ``room`` characters; a layer's or a file's name differs at its end."""
    return text if len(text) <= room else "…" + text[len(text) - room + 1:]


def wrapped(label: str, text: str, indent: int = 14) -> str:
    """``label   text`` with the text folded to the terminal and aligned under itself."""
    import textwrap

    return textwrap.fill(text, width(), initial_indent=label.ljust(indent),
                         subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def short_name(name: str) -> str:
    """``model.layers.3.mlp.up_proj`` → ``3.mlp.up_proj``."""
    return name.removeprefix("model.layers.")


def kind_of(name: str) -> str:
    """The same for all layers that stand at one place of the model: ``*.mlp.up_proj``."""
    return ".".join("*" if part.isdigit() else part for part in short_name(name).split("."))


def group_layers(rows: Iterable[Row], name: Callable[[Row], str], key: Callable[[Row], Hashable],
                 each: bool = False) -> list[tuple[str, list[Row]]]:
    """Rows of one kind and of equal keys together, in the order of the first of each.

    Args:
        rows: a row for each layer.
        name: a row's full name.
        key: the other facts that rows of a group have in common.
        each: a group for each row instead.

    Returns:
        The kind (with ``each`` the short name) and the rows of each group.
    """
    groups: dict[Hashable, tuple[str, list[Row]]] = {}
    for row in rows:
        label = short_name(name(row)) if each else kind_of(name(row))
        groups.setdefault((label, key(row)), (label, []))[1].append(row)
    return list(groups.values())
