"""A plot without a plotting library: KL and decode speed against file size, with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from quantkit.evaluate.metrics import Interval
from quantkit.evaluate.run import EvalResult, Row
from quantkit.report.base import Reporter, number, short_name

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 44, 52
COLOURS = ("#4e79a7", "#e15759", "#2a8f5b", "#b07aa1", "#c07c1e", "#3d9aa0", "#9c755f", "#d37295")
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #222 } .tick { font-size: 12px; fill: #555 }
.title { font-size: 16px; font-weight: 600 } .grid { stroke: #ddd } .axis { stroke: #888 }
.ground { fill: #fff }
@media (prefers-color-scheme: dark) { text { fill: #eee } .tick { fill: #aaa } .grid { stroke: #333 }
.axis { stroke: #888 } .ground { fill: #16181c } }
"""


@dataclass(frozen=True)
class _Point:
    label: str
    colour: str
    size: float  # MB
    y: Interval


@dataclass(frozen=True)
class _Scale:
    """A linear scale, or with ``root`` one of square roots, which keeps zero and spreads small KLs."""

    high: float
    begin: float
    end: float
    root: bool = False

    def __call__(self, value: float) -> float:
        share = max(value, 0.0) / self.high
        return self.begin + (self.end - self.begin) * (math.sqrt(share) if self.root else share)


def render(result: EvalResult) -> str:
    """An SVG document; panels stand above each other, so that it can be read on a phone."""
    panels = [("KL to the reference (lower is better)", _points(result.rows, "kl_mean"), True)]
    if any("decode_tok_s" in row.metrics for row in result.rows):
        panels.append(("decode, tokens per second (higher is better)",
                       _points(result.rows, "decode_tok_s"), False))
    total = HEIGHT * len(panels)
    body = "".join(_panel(title, points, root, HEIGHT * i) for i, (title, points, root) in enumerate(panels))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total}" role="img" '
            f'aria-label="KL and decode speed against file size">\n<style>{STYLE}</style>\n'
            f'<rect class="ground" width="{WIDTH}" height="{total}"/>\n{body}</svg>\n')


def _points(rows: Sequence[Row], metric: str) -> list[_Point]:
    return [_Point(short_name(row), COLOURS[i % len(COLOURS)], row.file_bytes / 1e6, row.metrics[metric])
            for i, row in enumerate(rows) if metric in row.metrics]


def _panel(title: str, points: Sequence[_Point], root: bool, top: float) -> str:
    xs, ys = _ticks(max(p.size for p in points)), _ticks(max(p.y.high for p in points))
    x = _Scale(xs[-1], LEFT, WIDTH - RIGHT)
    y = _Scale(ys[-1], top + HEIGHT - BOTTOM, top + TOP, root)
    out = [f'<text class="title" x="{LEFT}" y="{top + 26}">{escape(title)}</text>']
    for value in ys:
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" '
                   f'y2="{y(value):.1f}"/><text class="tick" x="{LEFT - 8}" y="{y(value) + 4:.1f}" '
                   f'text-anchor="end">{number(value, 2)}</text>')
    floor = top + HEIGHT - BOTTOM
    for value in xs:
        out.append(f'<line class="axis" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{floor}" y2="{floor + 5}"/>'
                   f'<text class="tick" x="{x(value):.1f}" y="{floor + 20}" text-anchor="middle">'
                   f'{number(value)}</text>')
    out.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{floor}" y2="{floor}"/>'
               f'<text class="tick" x="{WIDTH - RIGHT}" y="{floor + 40}" text-anchor="end">weights on disk, MB'
               f'</text>')
    taken: list[tuple[float, float, float]] = []
    for point in points:
        out += _mark(point, x(point.size), y, taken, top + TOP)
    return "\n".join(out) + "\n"


def _mark(point: _Point, cx: float, y: _Scale, taken: list[tuple[float, float, float]],
          ceiling: float) -> list[str]:
    cy, low, high = y(point.y.value), y(point.y.low), y(point.y.high)
    text = f"{point.label} {number(point.y.value)}"
    reach = 7.6 * len(text)
    left = cx + 12 + reach > WIDTH - 4
    begin = cx - 12 - reach if left else cx + 12
    row = cy + 5
    step = 18 if cy < ceiling + 40 else -18
    while any(abs(row - other) < 17 and begin < stop and start < begin + reach for start, stop, other in taken):
        row += step
    taken.append((begin, begin + reach, row))
    return [f'<line x1="{cx:.1f}" x2="{cx:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{point.colour}" '
            f'stroke-width="2"/><circle cx="{cx:.1f}" cy="{cy:.1f}" r="6" fill="{point.colour}"/>',
            f'<text x="{cx - 12 if left else cx + 12:.1f}" y="{row:.1f}" '
            f'text-anchor="{"end" if left else "start"}">{escape(text)}</text>']


def _ticks(high: float) -> list[float]:
    """0 and up to six round steps that reach ``high``."""
    if high <= 0:
        return [0.0, 1.0]
    raw = high / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    return [i * step for i in range(math.ceil(high / step - 1e-9) + 1)]


REPORTER = Reporter("svg", "plot.svg", render)
