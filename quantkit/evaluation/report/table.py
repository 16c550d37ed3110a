"""A table for the terminal, never wider than 80 columns: a model's value over its interval."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from quantkit.evaluation.effect import effect_of_row
from quantkit.evaluation.metric_table import MetricInfo
from quantkit.evaluation.report import quality_grids
from quantkit.evaluation.report.base import (
    Reporter,
    TextGrid,
    columns_of,
    head,
    kilobytes,
    megabytes,
    number,
    shown,
    spread,
    tasks_of,
    withheld,
)
from quantkit.evaluation.report.headline import headline
from quantkit.evaluation.report.terminal import WIDTH, columns, cut, fold, grid_lines, safe, title_line
from quantkit.evaluation.result import EvalResult, short_names

LEADING = 3
"""Metrics that stand before sizes."""
_VERDICTS = {"better": "better", "worse": "worse", "indistinguishable": "=", "undecided": "?"}


@dataclass(frozen=True)
class _Column:
    """A head and, for each row, lines of a cell: a value and its interval, or two values."""

    head: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]

    def stacked(self) -> _Column:
        """With an interval over two lines."""
        return _Column(self.head, tuple(tuple(_stacked(cell)) for cell in self.cells))

    @property
    def width(self) -> int:
        return max(columns(part) for cell in (self.head, *self.cells) for part in cell)

    @property
    def empty(self) -> bool:
        """Whether no row has a value."""
        return all(part in ("–", "") for cell in self.cells for part in cell)


def render(result: EvalResult) -> str:
    """The headline and the command, the table, and how it was made below."""
    out = [line for text in headline(result) for line in fold(safe(text))]
    out += [line for text in withheld(result) for line in fold(safe(text))]
    out += _command(result) + ([""] if out or result.command else [])
    beside, below = _fitting(result)
    total = sum(column.width for column in beside)
    gap = 2 if total + 2 * (len(beside) - 1) <= WIDTH else 1
    total += gap * (len(beside) - 1)
    out += _lines([column.head for column in beside], beside, gap)
    for index, (name, row) in enumerate(zip(short_names(result.rows), result.rows)):
        effect = effect_of_row(row) if index else None
        out += [_rule(name, f"cost {effect}, {row.method}" if effect else row.method, total),
                *_lines([column.cells[index] for column in beside], beside, gap)]
    out.append("")
    out += _grids(result)
    out += _blocks(result, below | tasks_of(result))
    out += _exact(result)
    out += _paired(result)
    for text in result.protocol.lines():
        out += fold(text)
    out += fold("the first model is the reference; bits/weight counts its Linear layers; "
                "below each value: 95% bootstrap over windows, or the range of the timed runs")
    return "\n".join(out) + "\n"


def _command(result: EvalResult) -> list[str]:
    """The command in lines that a shell takes as one."""
    if result.command is None:
        return []
    lines: list[str] = []
    for word in _words(result.command):
        if lines and columns(lines[-1]) + columns(word) < WIDTH - 2:
            lines[-1] += f" {word}"
        else:
            lines.append(f"    {word}" if lines else f"Reproduce: {word}")
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def _words(command: str) -> list[str]:
    """The words of a command, quoted as a shell needs it; an option's value stays beside it."""
    words: list[str] = []
    for word in shlex.split(command):
        if words and words[-1].startswith("-") and " " not in words[-1] and not word.startswith("-"):
            words[-1] += f" {safe(shlex.quote(word))}"
        else:
            words.append(safe(shlex.quote(word)))
    return words


def _columns(result: EvalResult) -> Iterator[tuple[str | None, _Column]]:
    """All columns in their order, each with its metric's key; the first metrics stand before the sizes."""
    metrics = [(key, _Column((safe(head(info)[0]), *filter(None, [_unit(info)])),
                             tuple(shown(row.metrics.get(key), info) for row in result.rows)))
               for key, info in columns_of(result).items()]
    yield from metrics[:LEADING]
    rows = result.rows
    files = [(megabytes(row.file_bytes), megabytes(row.peak_bytes)) for row in rows]
    lines = 2 if any(row.peak_bytes is not None for row in rows) else 1
    yield None, _Column(("file", "peak")[:lines], tuple(file[:lines] for file in files))
    yield None, _Column(("bits/", "weight"), tuple((number(row.bits_per_weight),) for row in rows))
    yield None, _Column(("KV/token", "KV all"), tuple(
        (kilobytes(row.kv_bytes_per_token), megabytes(row.kv_bytes)) for row in rows))
    yield from metrics[LEADING:]


def _unit(info: MetricInfo) -> str:
    """A unit of a rate stands below the title; others are left to the longer reports."""
    unit = head(info)[1]
    return safe(unit) if len(unit) <= 8 else ""


def _fitting(result: EvalResult) -> tuple[list[_Column], dict[str, MetricInfo]]:
    """The columns that fit beside each other, and the metrics that must stand below."""
    metrics = columns_of(result)
    beside: list[_Column] = []
    below: dict[str, MetricInfo] = {}
    every = [(key, column) for key, column in _columns(result) if not column.empty]
    if sum(column.width + 1 for _, column in every) - 1 > WIDTH:
        every = [(key, column.stacked()) for key, column in every]
    room = WIDTH + 1 - sum(column.width + 1 for key, column in every if key is None)
    for key, column in every:
        if key is not None:
            if below or column.width + 1 > room:
                below[key] = metrics[key]
                continue
            room -= column.width + 1
        beside.append(column)
    return beside, below


def _stacked(cell: tuple[str, ...]) -> list[str]:
    for between in ("–", " to "):
        low, dash, high = cell[-1].partition(between)
        if len(cell) == 2 and low and high:
            return [cell[0], low + dash.rstrip(), high]
    return list(cell)


def _blocks(result: EvalResult, metrics: Mapping[str, MetricInfo]) -> list[str]:
    """A line a metric and model: value, 95% interval and the difference to the first model's."""
    out: list[str] = []
    rows, names = result.rows, short_names(result.rows)
    for key, info in metrics.items():
        out.append(title_line(", ".join(filter(None, map(safe, head(info))))))
        first = rows[0].metrics.get(key)
        for name, row in zip(names, rows):
            interval = row.metrics.get(key)
            value, span = shown(interval, info)
            change = "" if interval is None or first is None or row is rows[0] else _change(
                interval.value - first.value, info)
            verdict = next((_VERDICTS[test.verdict] for test in row.differences
                            if test.metric == key and not test.text), "")
            out.append(f"{_left(name, 32)}  {value:>7}  {span:>17}  {change:>8}  {verdict}".rstrip())
        out.append("")
    return out


def _grids(result: EvalResult) -> list[str]:
    """The tails of KL, and KL by text: a line a model."""
    out: list[str] = []
    for grid, title in ((quality_grids.tails(result), ""), *((grid, ", by text") for grid in
                                                             quality_grids.texts(result)[:1])):
        if grid is not None:
            cells = tuple((row[0], *(cell.partition("\n")[0] for cell in row[1:])) for row in grid.rows)
            heads = tuple(safe(text.partition("\n")[0]) for text in grid.heads)
            out += [title_line(grid.title + title),
                    *grid_lines(TextGrid(grid.title, heads, cells, grid.notes))]
    return out


def _paired(result: EvalResult) -> list[str]:
    """What the signs behind differences mean, if there are any."""
    if not any(row.differences for row in result.rows):
        return []
    return fold("paired tests against the reference, item by item: = indistinguishable within ε; ? undecided")


def _change(difference: float, info: MetricInfo) -> str:
    if info.unit == "%":
        return f"{100 * difference:+.1f}"
    return quality_grids.signed(difference)


def _exact(result: EvalResult) -> list[str]:
    """A line a model: its KL from float32 arithmetic, and how far that is above the reference's own."""
    rows = quality_grids.exact_rows(result)
    if not rows:
        return []
    out = [title_line("KL from the reference in float32 arithmetic")]
    for row in rows:
        value, span = spread(row.kl)
        change = "" if row.above is None else f"{row.above:+.5f}"
        out.append(f"{_left(row.name, 32)}  {value:>8}  {span:>17}  {change:>8}".rstrip())
    return [*out, *fold("The first of these is the noise floor: the reference's own arithmetic. "
                        "The last column is what others are above it."), ""]


def _lines(cells: Sequence[Sequence[str]], beside: Sequence[_Column], gap: int) -> list[str]:
    height = max(map(len, cells), default=0)
    filled = [[*cell, *[""] * (height - len(cell))] for cell in cells]
    lines = ((" " * gap).join(" " * (column.width - columns(cell[n])) + cell[n]
                              for cell, column in zip(filled, beside)) for n in range(height))
    return [line.rstrip() for line in lines if line.strip()]


def _rule(name: str, method: str, total: int) -> str:
    """A line across the table with the model's name, cut on the left, and what was done to it."""
    total = max(total, 40)
    method = cut(method, total // 2)
    name = cut(name, total - columns(method) - 8, tail=True)
    text = f"── {name} " if name.endswith(f" {method}") else f"── {name} · {method} "
    return text + "─" * (total - columns(text))


def _left(text: str, room: int) -> str:
    """Cut on the left, and filled up on the right."""
    text = cut(text, room, tail=True)
    return text + " " * (room - columns(text))


REPORTER = Reporter("table", "table.txt", render, in_folder=False)
