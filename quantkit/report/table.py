"""A table for the terminal, never wider than 80 columns: two lines a model, value over interval."""

from __future__ import annotations

from quantkit.evaluate.run import EvalResult, Row
from quantkit.report.base import Reporter, megabytes, number, short_name, spread

WIDTH = 80
_HEADS = (("model", ""), ("bits/", "weight"), ("file", "peak"), ("perplexity", ""), ("KL", ""),
          ("top-1", ""), ("prefill", "tok/s"), ("decode", "tok/s"))


def render(result: EvalResult) -> str:
    """The table, its protocol below."""
    cells = [_HEADS, *(_cells(row) for row in result.rows)]
    widths = [max(len(part) for line in cells for part in line[i]) for i in range(len(_HEADS))]
    room = WIDTH - sum(widths[1:]) - (len(widths) - 1)
    widths[0] = max(8, min(widths[0], room))
    out = []
    for n, line in enumerate(cells):
        if n:
            out.append("─" * min(WIDTH, sum(widths) + len(widths) - 1))
        for half in (0, 1):
            texts = [cell[half] for cell in line]
            first = texts[0] if len(texts[0]) <= widths[0] else "…" + texts[0][-(widths[0] - 1):]
            out.append(" ".join([first.ljust(widths[0])] + [t.rjust(w) for t, w in
                                                            zip(texts[1:], widths[1:])]).rstrip())
    out.append("")
    if result.noise_floor is not None:
        value, span = spread(result.noise_floor)
        out.append(f"noise floor: KL {value} ({span}) between the reference's own arithmetic and float32")
    for text in result.protocol.lines():
        out += _fold(text)
    out += _fold("KL and top-1 are against the first model; bits/weight counts its Linear layers; "
                 "below each value: 95% bootstrap over windows, or the range of the timed runs")
    return "\n".join(line for line in out) + "\n"


def _cells(row: Row) -> tuple[tuple[str, str], ...]:
    m = row.metrics
    return ((short_name(row), row.method), (number(row.bits_per_weight), ""),
            (megabytes(row.file_bytes), megabytes(row.peak_bytes)), spread(m.get("perplexity")),
            spread(m.get("kl_mean")), spread(m.get("top1"), percent=True), spread(m.get("prefill_tok_s")),
            spread(m.get("decode_tok_s")))


def _fold(text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, WIDTH, subsequent_indent="  ")


REPORTER = Reporter("table", "table.txt", render)
