"""Writes a report in Markdown."""

from __future__ import annotations

import re

from quantkit.evaluate.metrics import EXACT
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

_MARKUP = re.compile(r"[\\`*_\[\]|#]")


def render(result: EvalResult) -> str:
    """Table, plot, kernels, answers and protocol. The plot is ``plot.svg`` beside it."""
    names = [plain(name) for name in short_names(result.rows)]
    lines = ["# What each variant costs and saves", "", *_table(names, result.rows), "",
             "Values in small print are intervals: a 95% bootstrap over windows for quality, the range of "
             "the timed runs for speed. KL and top-1 compare with the first model. Bits per weight counts "
             "the Linear layers; the file also holds embeddings and norms.", "",
             "![KL and decode speed against bytes](plot.svg)", ""]
    if any(row.kv is not None for row in result.rows):
        lines += ["KV per token counts codes and scales of all layers; KV in all is what was allocated when "
                  f"a window's {result.protocol.window} tokens were there.", ""]
    lines += _tasks(names, result.rows)
    lines += _exact(names, result)
    if any(row.kernels for row in result.rows):
        lines += ["## Kernels", "", "| model | prefill | decode |", "|---|---|---|"]
        lines += [f"| {name} | {_kernels(row, 'prefill')} | {_kernels(row, 'decode')} |"
                  for name, row in zip(names, result.rows)]
        lines.append("")
    if any(row.answer for row in result.rows):
        lines += [f"## Answers to “{plain(result.question or '')}”", ""]
        for name, row in zip(names, result.rows):
            # a model may write anything: shown as it is, not as markup
            quoted = "\n".join(f"    {text}" for text in (row.answer or "").strip().splitlines())
            lines += [f"**{name}** ({plain(row.method)})", "", quoted, ""]
    lines += ["## Protocol", "", *(f"- {plain(text)}" for text in result.protocol.lines()), ""]
    return "\n".join(lines)


def _table(names: list[str], rows: list[ModelResult]) -> list[str]:
    cached = any(row.kv is not None for row in rows)
    head = ("model", "method", "bits per weight", "file", "peak memory",
            *(("KV per token", "KV in all") if cached else ()), "perplexity", "KL", "top-1",
            "prefill tok/s", "decode tok/s")
    lines = ["| " + " | ".join(head) + " |", "|---|---|" + "--:|" * (len(head) - 2)]
    for name, row in zip(names, rows):
        m = row.metrics
        cells = [name, plain(row.method), number(row.bits_per_weight),
                 megabytes(row.file_bytes), megabytes(row.peak_bytes)]
        if cached:
            cells += [kilobytes(row.kv_bytes_per_token), megabytes(row.kv_bytes)]
        for key in ("perplexity", "kl_mean", "top1", "prefill_tok_s", "decode_tok_s"):
            value, span = spread(m.get(key), percent=key == "top1")
            cells.append(f"{value}<br><sub>{span}</sub>" if span else value)
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _tasks(names: list[str], rows: list[ModelResult]) -> list[str]:
    tasks = task_names(rows)
    if not tasks:
        return []
    lines = ["## Tasks", "", "| model | " + " | ".join(plain(task) for task in tasks) + " |",
             "|---|" + "--:|" * len(tasks)]
    for name, row in zip(names, rows):
        cells = []
        for task in tasks:
            value, span = task_score(row, task)
            cells.append(f"{value}<br><sub>{span}</sub>" if span else value)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _exact(names: list[str], result: EvalResult) -> list[str]:
    floor = result.noise_floor
    if floor is None:
        return []
    lines = ["## Noise floor", "",
             "KL from the reference's weights in float32 arithmetic. The first is the noise floor, what the "
             "reference's own arithmetic costs: what is not above it is indistinguishable from nothing.", "",
             "| model | KL | above the floor |", "|---|--:|--:|"]
    for name, row in zip(names, result.rows):
        exact = row.metrics.get(EXACT)
        value, span = spread(exact)
        above = "–" if exact is None or row is result.rows[0] else f"{exact.value - floor.value:+.5f}"
        lines.append(f"| {name} | {value}{f'<br><sub>{span}</sub>' if span else ''} | {above} |")
    return [*lines, ""]


def plain(text: str) -> str:
    """``text`` with everything escaped that Markdown or HTML would take for markup."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(text.split())).replace("<", "&lt;")


def _kernels(row: ModelResult, phase: str) -> str:
    return ", ".join(f"{name} × {count}" for name, count in row.kernels.get(phase, {}).items()) or "–"


REPORTER = Reporter("markdown", "report.md", render)
