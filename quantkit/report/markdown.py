"""Writes a report in Markdown."""

from __future__ import annotations

import re

from quantkit.evaluate.keys import EXACT
from quantkit.evaluate.metric_table import MetricInfo
from quantkit.evaluate.result import EvalResult, ModelResult
from quantkit.report.base import (
    Reporter,
    columns_of,
    head,
    kilobytes,
    megabytes,
    number,
    short_names,
    shown,
    spread,
    tasks_of,
)
from quantkit.report.headline import headline

_MARKUP = re.compile(r"[\\`*_\[\]|#~]")
_COLUMNS, _LETTERS = 3, 20
"""Columns of a table beside the names, and letters of their longest words together: a phone shows no more."""
_WORD = 20


def render(result: EvalResult) -> str:
    """Headline, command, tables, plot, kernels, answers and protocol. The plot is ``plot.svg`` beside it."""
    names = [_short(name) for name in short_names(result.rows)]
    columns = [_metric(result, key, info) for key, info in columns_of(result).items()]
    leading = _fitting(columns)
    named = [f"{name}<br><sub>{megabytes(row.file_bytes)} · {_short(row.method)}</sub>"
             for name, row in zip(names, result.rows)]
    lines = ["# What each variant costs and saves", "", *_headline(result), *_reproduce(result),
             *_table("variant", named, columns[:leading]),
             "The first variant is the reference. Below a variant's name are its file's size and its method, "
             "below a value its interval: a 95% bootstrap over windows for quality, the range of the timed "
             "runs for speed.", ""]
    if any(key in row.metrics for key in result.plotted for row in result.rows):
        lines += ["![Quality and speed against bytes](plot.svg)", ""]
    if columns[leading:]:
        lines += ["## Other measurements", "", *_tables(names, columns[leading:])]
    lines += ["## Size", "", *_tables(names, _sizes(result.rows)),
              "Bits per weight counts the Linear layers; the file also holds embeddings and norms.", ""]
    if any(row.kv is not None for row in result.rows):
        lines += ["KV per token counts codes and scales of all layers; KV in all is what was allocated when "
                  f"a window's {result.protocol.window} tokens were there, with the decoded pages of a "
                  "plugin's codec.", ""]
    tasks = [_metric(result, key, info) for key, info in tasks_of(result).items()]
    if tasks:
        lines += ["## Tasks", "", *_tables(names, tasks)]
    lines += _exact(names, result)
    if any(row.kernels for row in result.rows):
        lines += ["## Kernels", "", *_table("variant", names, [
            (phase, [_kernels(row, phase) for row in result.rows])
            for phase in ("prefill", "decode")], "---")]
    if any(row.answer for row in result.rows):
        lines += [f"## Answers to “{plain(result.question or '')}”", ""]
        for name, row in zip(names, result.rows):
            # a model may write anything: shown as it is, not as markup
            quoted = "\n".join(f"    {text}" for text in (row.answer or "").strip().splitlines())
            lines += [f"**{name}** ({plain(row.method)})", "", quoted, ""]
    lines += ["## Protocol", "", *(f"- {plain(text)}" for text in result.protocol.lines()), ""]
    return "\n".join(lines)


def _headline(result: EvalResult) -> list[str]:
    sentences = headline(result)
    if len(sentences) == 1:
        return [f"**{plain(sentences[0])}**", ""]
    return [*(f"- **{plain(sentence)}**" for sentence in sentences), ""] if sentences else []


def _reproduce(result: EvalResult) -> list[str]:
    """The command as code: between more backticks than are in it."""
    if result.command is None:
        return []
    command = " ".join(result.command.splitlines())
    fence = "`" * (1 + max(map(len, re.findall("`+", command)), default=0))
    pad = " " if "`" in command else ""
    return [f"Reproduce: {fence}{pad}{command}{pad}{fence}", ""]


def _metric(result: EvalResult, key: str, info: MetricInfo) -> tuple[str, list[str]]:
    """A column: head and cells."""
    title, unit = map(plain, head(info))
    return title + (f"<br><sub>{unit}</sub>" if unit else ""), [
        _cell(*shown(row.metrics.get(key), info)) for row in result.rows]


def _cell(value: str, span: str) -> str:
    return f"{value}<br><sub>{span}</sub>" if span else value


def _sizes(rows: list[ModelResult]) -> list[tuple[str, list[str]]]:
    sizes = [("file", [megabytes(row.file_bytes) for row in rows]),
             ("bits per weight", [number(row.bits_per_weight) for row in rows]),
             ("peak memory", [megabytes(row.peak_bytes) for row in rows]),
             ("KV per token", [kilobytes(row.kv_bytes_per_token) for row in rows]),
             ("KV in all", [megabytes(row.kv_bytes) for row in rows])]
    return [(title, cells) for title, cells in sizes if set(cells) != {"–"}]


def _tables(names: list[str], columns: list[tuple[str, list[str]]]) -> list[str]:
    """As many tables as it takes for none to be wide."""
    lines = []
    while columns:
        count = _fitting(columns)
        lines += _table("variant", names, columns[:count])
        columns = columns[count:]
    return lines


def _fitting(columns: list[tuple[str, list[str]]]) -> int:
    """How many of the first columns stand beside each other: one at least."""
    letters = 0
    for count, (title, cells) in enumerate(columns[:_COLUMNS]):
        texts = (text.partition("<br>")[0] for text in (title, *cells))
        letters += max(len(word) for text in texts for word in text.split() or [""])
        if count and letters > _LETTERS:
            return count
    return min(_COLUMNS, len(columns))


def _table(title: str, names: list[str], columns: list[tuple[str, list[str]]],
           align: str = "--:") -> list[str]:
    lines = ["| " + " | ".join([title, *(top for top, _ in columns)]) + " |",
             "|---|" + f"{align}|" * len(columns)]
    lines += ["| " + " | ".join([name, *(cells[index] for _, cells in columns)]) + " |"
              for index, name in enumerate(names)]
    return [*lines, ""]


def _exact(names: list[str], result: EvalResult) -> list[str]:
    floor = result.noise_floor
    if floor is None:
        return []
    exact = [row.metrics.get(EXACT) for row in result.rows]
    above = ["–" if interval is None or index == 0 else f"{interval.value - floor.value:+.5f}"
             for index, interval in enumerate(exact)]
    return ["## Noise floor", "",
            "KL from the reference's weights in float32 arithmetic. The first is the noise floor, what the "
            "reference's own arithmetic costs: what is not above it is indistinguishable from nothing.", "",
            *_table("variant", names, [("KL", [_cell(*spread(interval)) for interval in exact]),
                                       ("above the floor", above)])]


def _short(name: str) -> str:
    """A name that leaves room for numbers: words that can't be wrapped are cut; their ends differ more."""
    return plain(" ".join(word if len(word) <= _WORD else "…" + word[-_WORD + 1:] for word in name.split()))


def plain(text: str) -> str:
    """``text`` with everything escaped that Markdown or HTML would take for markup."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(text.split())).replace("<", "&lt;")


def _kernels(row: ModelResult, phase: str) -> str:
    return ", ".join(f"{plain(name)} × {count}" for name, count in row.kernels.get(phase, {}).items()) or "–"


REPORTER = Reporter("markdown", "report.md", render)
