"""A report to read and to pass on."""

from __future__ import annotations

from quantkit.evaluate.run import EvalResult, Row
from quantkit.report.base import Reporter, megabytes, number, short_name, spread


def render(result: EvalResult) -> str:
    """Table, plot, kernels, answers and protocol. The plot is ``plot.svg`` beside it."""
    lines = ["# What each variant costs and saves", "", *_table(result.rows), "",
             "Values in small print are intervals: a 95% bootstrap over windows for quality, the range of "
             "the timed runs for speed. KL and top-1 compare with the first model. Bits per weight counts "
             "the Linear layers; the file also holds embeddings and norms.", "",
             "![KL and decode speed against file size](plot.svg)", ""]
    if result.noise_floor is not None:
        value, span = spread(result.noise_floor)
        lines += [f"**Noise floor:** KL {value} ({span}), the reference's own arithmetic against float32. "
                  "A smaller KL is indistinguishable from none.", ""]
    if any(row.kernels for row in result.rows):
        lines += ["## Kernels", "", "| model | prefill | decode |", "|---|---|---|"]
        lines += [f"| {short_name(row)} | {_kernels(row, 'prefill')} | {_kernels(row, 'decode')} |"
                  for row in result.rows]
        lines.append("")
    if any(row.answer for row in result.rows):
        lines += [f"## Answers to “{result.question}”", ""]
        for row in result.rows:
            quoted = (row.answer or "").strip().replace("\n", "\n> ")
            lines += [f"**{short_name(row)}** ({row.method})", "", f"> {quoted}", ""]
    lines += ["## Protocol", "", *(f"- {text}" for text in result.protocol.lines()), ""]
    return "\n".join(lines)


def _table(rows: list[Row]) -> list[str]:
    head = ("model", "method", "bits per weight", "file", "peak memory", "perplexity", "KL", "top-1",
            "prefill tok/s", "decode tok/s")
    lines = ["| " + " | ".join(head) + " |", "|---|---|" + "--:|" * (len(head) - 2)]
    for row in rows:
        m = row.metrics
        cells = [short_name(row), row.method, number(row.bits_per_weight), megabytes(row.file_bytes),
                 megabytes(row.peak_bytes)]
        for name in ("perplexity", "kl_mean", "top1", "prefill_tok_s", "decode_tok_s"):
            value, span = spread(m.get(name), percent=name == "top1")
            cells.append(f"{value}<br><sub>{span}</sub>" if span else value)
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _kernels(row: Row, phase: str) -> str:
    return ", ".join(f"{name} × {count}" for name, count in row.kernels.get(phase, {}).items()) or "–"


REPORTER = Reporter("markdown", "report.md", render)
