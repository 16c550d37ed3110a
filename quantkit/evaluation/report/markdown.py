"""Writes a report in Markdown."""

from __future__ import annotations

import re

from quantkit.evaluation.metric_table import MetricInfo
from quantkit.evaluation.report import quality_grids, speed_grids
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
    withheld,
)
from quantkit.evaluation.report.frontier import QUALITY
from quantkit.evaluation.report.headline import headline
from quantkit.evaluation.report.markdown_tables import cell, fitting, grid_lines, plain, short, table, tables
from quantkit.evaluation.result import EvalResult, ModelResult, short_names


def render(result: EvalResult) -> str:
    """Headline, command, tables, picture, kernels, answers and protocol. The picture is
    ``frontier.svg`` beside it."""
    names = [short(name) for name in short_names(result.rows)]
    columns = [_metric(result, key, info) for key, info in columns_of(result).items()]
    leading = fitting(columns)
    named = [f"{name}<br><sub>{megabytes(row.file_bytes)} · {short(row.method)}</sub>"
             for name, row in zip(names, result.rows)]
    lines = ["# What each variant costs and saves", "", *_headline(result),
             *(line for text in withheld(result) for line in (plain(text), "")), *_reproduce(result),
             *table("variant", named, columns[:leading]),
             "The first variant is the reference. Below a variant's name are its file's size and its method, "
             "below a value its interval: a 95% bootstrap over windows for quality, the range of the timed "
             "runs for speed.", ""]
    if any(key in row.metrics for key in (QUALITY, *result.plotted) for row in result.rows):
        lines += ["![Quality against speed and bytes, and the frontier](frontier.svg)", ""]
    lines += _section("KL by token", quality_grids.tails(result), titled=False)
    if columns[leading:]:
        lines += ["## Other measurements", "", *tables(names, columns[leading:])]
    lines += ["## Size", "", *tables(names, _sizes(result.rows)),
              "Bits per weight counts the Linear layers; the file also holds embeddings and norms.", ""]
    if any(row.kv is not None for row in result.rows):
        lines += ["KV per token counts codes and scales of all layers; KV in all is what was allocated when "
                  f"a window's {result.protocol.window} tokens were there, with the decoded pages of a "
                  "plugin's codec.", ""]
    lines += _section("Quality by text", *quality_grids.texts(result)[:1])
    lines += _section("Against the reference, in pairs", quality_grids.differences(result, tasks=False),
                      titled=False)
    lines += _section("Tasks", quality_grids.tasks(result), titled=False)
    lines += _section("Decode", *speed_grids.decode_grids(result), speed_grids.gaps(result))
    lines += _section("Prefill", *speed_grids.prefill_grids(result))
    lines += _section("Memory", speed_grids.memory(result), titled=False)
    lines += _section("Roofline", *map(speed_grids.roofline_grid, result.roofline))
    lines += _exact(result)
    if any(row.kernels for row in result.rows):
        lines += ["## Kernels", "", *table("variant", names, [
            (phase, [plain(speed_grids.kernel_counts(row, phase)) for row in result.rows])
            for phase in ("prefill", "decode")], "---")]
    if any(row.answer for row in result.rows):
        lines += [f"## Answers to “{plain(result.question or '')}”", ""]
        for name, row in zip(names, result.rows):
            # a model may write anything: shown as it is, not as markup
            quoted = "\n".join(f"    {text}" for text in (row.answer or "").strip().splitlines())
            lines += [f"**{name}** ({plain(row.method)})", "", quoted, ""]
    lines += ["## Protocol", "", *(f"- {plain(text)}" for text in result.protocol.lines()), ""]
    return "\n".join(lines)


def _section(title: str, *grids: TextGrid | None, titled: bool = True) -> list[str]:
    """Grids under a heading, if there are any; a single one needs no title of its own."""
    lines = [line for grid in grids for line in grid_lines(grid, titled)]
    return [f"## {title}", "", *lines] if lines else []


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
        cell(*shown(row.metrics.get(key), info)) for row in result.rows]


def _sizes(rows: list[ModelResult]) -> list[tuple[str, list[str]]]:
    sizes = [("file", [megabytes(row.file_bytes) for row in rows]),
             ("bits per weight", [number(row.bits_per_weight) for row in rows]),
             ("peak memory", [megabytes(row.peak_bytes) for row in rows]),
             ("KV per token", [kilobytes(row.kv_bytes_per_token) for row in rows]),
             ("KV in all", [megabytes(row.kv_bytes) for row in rows])]
    return [(title, cells) for title, cells in sizes if set(cells) != {"–"}]


def _exact(result: EvalResult) -> list[str]:
    rows = quality_grids.exact_rows(result)
    if not rows:
        return []
    return ["## Noise floor", "",
            "KL from the reference's weights in float32 arithmetic. The first is the noise floor, what the "
            "reference's own arithmetic costs: what is not above it is indistinguishable from nothing.", "",
            *table("variant", [short(row.name) for row in rows], [
                ("KL", [cell(*spread(row.kl)) for row in rows]),
                ("above the floor", ["–" if row.above is None else f"{row.above:+.5f}" for row in rows])])]


REPORTER = Reporter("markdown", "report.md", render)
