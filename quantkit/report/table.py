"""A table for the terminal, never wider than 80 columns: a model's value over its interval."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from unicodedata import combining, east_asian_width

from quantkit.evaluate.metrics import EXACT, Interval
from quantkit.evaluate.result import EvalResult, ModelResult
from quantkit.report.base import (
    Reporter,
    kilobytes,
    megabytes,
    number,
    short_names,
    spread,
    task_names,
    task_score,
)

WIDTH = 80
_HEADS = (("bits/", "weight"), ("file", "peak"), ("perplexity",), ("KL",), ("top-1",),
          ("prefill", "tok/s"), ("decode", "tok/s"))
_KV_HEAD = ("KV/token", "KV all")


def render(result: EvalResult) -> str:
    """The table, its protocol below."""
    cached = any(row.kv is not None for row in result.rows)
    heads = (*_HEADS[:2], _KV_HEAD, *_HEADS[2:]) if cached else _HEADS
    models = [_cells(row, False, cached) for row in result.rows]
    widths = _widths(heads, models)
    if sum(widths) + len(widths) - 1 > WIDTH:
        models = [_cells(row, True, cached) for row in result.rows]
        widths = _widths(heads, models)
    gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= WIDTH else 1
    total = sum(widths) + gap * (len(widths) - 1)
    out = _lines(heads, widths, gap)
    for name, row, cells in zip(short_names(result.rows), result.rows, models):
        out += [_rule(name, row.method, total), *_lines(cells, widths, gap)]
    out.append("")
    out += _tasks(result)
    out += _exact(result)
    for text in result.protocol.lines():
        out += fold(text)
    out += fold("KL and top-1 are against the first model; bits/weight counts its Linear layers; "
                "below each value: 95% bootstrap over windows, or the range of the timed runs")
    return "\n".join(out) + "\n"


def _cells(row: ModelResult, stacked: bool, cached: bool) -> tuple[tuple[str, ...], ...]:
    """A column's lines: the value, and its interval, ``stacked`` over two lines if one is too wide."""
    def cell(name: str, percent: bool = False) -> tuple[str, ...]:
        interval: Interval | None = row.metrics.get(name)
        value, span = spread(interval, percent=percent)
        low, dash, high = span.partition("–")
        return (value, low + dash, high) if stacked else (value, span)

    kv = ((kilobytes(row.kv_bytes_per_token), megabytes(row.kv_bytes)),) if cached else ()
    return ((number(row.bits_per_weight),), (megabytes(row.file_bytes), megabytes(row.peak_bytes)), *kv,
            cell("perplexity"), cell("kl_mean"), cell("top1", True), cell("prefill_tok_s"),
            cell("decode_tok_s"))


def _widths(heads: Sequence[Sequence[str]], models: Sequence[Sequence[Sequence[str]]]) -> list[int]:
    return [max(len(part) for cells in (heads, *models) for part in cells[i]) for i in range(len(heads))]


def _tasks(result: EvalResult) -> list[str]:
    """A line a task and model: score, 95% interval and the difference to the first model's."""
    out: list[str] = []
    rows, names = result.rows, short_names(result.rows)
    for task in task_names(rows):
        title = f"── {task.replace('/', ' · ')} "
        out.append(cut(title + "─" * (62 - columns(title)), WIDTH))
        first = rows[0].metrics.get(task)
        for name, row in zip(names, rows):
            score = row.metrics.get(task)
            value, span = task_score(row, task)
            factor = 100 if value.endswith("%") else 1
            change = "" if score is None or first is None or row is rows[0] else (
                f"{factor * (score.value - first.value):+.1f}")
            out.append(f"{_left(name, 32)}  {value:>6}  {span:>11}  {change:>5}".rstrip())
        out.append("")
    return out


def _exact(result: EvalResult) -> list[str]:
    """A line a model: its KL from float32 arithmetic, and how far that is above the reference's own."""
    floor = result.noise_floor
    if floor is None:
        return []
    title = "── KL from the reference in float32 arithmetic "
    out = [title + "─" * (62 - columns(title))]
    for name, row in zip(short_names(result.rows), result.rows):
        exact = row.metrics.get(EXACT)
        value, span = spread(exact)
        change = "" if exact is None or row is result.rows[0] else f"{exact.value - floor.value:+.5f}"
        out.append(f"{_left(name, 32)}  {value:>8}  {span:>17}  {change:>8}".rstrip())
    return [*out, *fold("The first of these is the noise floor: the reference's own arithmetic. "
                        "The last column is what others are above it."), ""]


def _lines(cells: Sequence[Sequence[str]], widths: Sequence[int], gap: int) -> list[str]:
    height = max(map(len, cells))
    filled = [[*cell, *[""] * (height - len(cell))] for cell in cells]
    lines = ((" " * gap).join(cell[n].rjust(w) for cell, w in zip(filled, widths)) for n in range(height))
    return [line.rstrip() for line in lines if line.strip()]


def _rule(name: str, method: str, total: int) -> str:
    """A line across the table with the model's name, cut on the left, and what was done to it."""
    method = cut(method, total // 2)
    name = cut(name, total - columns(method) - 8, tail=True)
    text = f"── {name} · {method} "
    return text + "─" * (total - columns(text))


def cut(text: str, room: int, tail: bool = False) -> str:
    """At most ``room`` columns of a text, harmless for a terminal. ``tail`` keeps the end of it."""
    text = "".join(c if c.isprintable() else "?" for c in text)
    if columns(text) <= room:
        return text
    while columns(text) > room - 1:
        text = text[1:] if tail else text[:-1]
    return f"…{text}" if tail else f"{text}…"


def _left(text: str, room: int) -> str:
    """Cut on the left, and filled up on the right."""
    text = cut(text, room, tail=True)
    return text + " " * (room - columns(text))


def columns(text: str) -> int:
    """Columns of a terminal: two for a wide character, none for a combining one."""
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def fold(text: str) -> list[str]:
    """Lines of at most :data:`WIDTH` columns."""
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ")


REPORTER = Reporter("table", "table.txt", render)
