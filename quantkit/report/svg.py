"""A plot without a plotting library: metrics against bytes, with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from quantkit.evaluate.metric_table import MetricInfo
from quantkit.evaluate.metrics import Interval
from quantkit.evaluate.result import EvalResult, ModelResult
from quantkit.report.base import Reporter, number, short_names
from quantkit.report.svg_labels import LabelBox, PlotLabel, cut, place
from quantkit.report.svg_legend import RADIUS, MarkStyle, legend, mark, styles

WIDTH, HEIGHT = 520, 310
LEFT, RIGHT, TOP, BOTTOM = 56, 24, 46, 56
STYLE = """
text { font: 15px system-ui, sans-serif; fill: #222 } .tick { font-size: 13px; fill: #555 }
.title { font-weight: 600 } .grid { stroke: #ddd } .axis { stroke: #888 } .ground { fill: #fff }
.mark { stroke: #fff; stroke-width: 1px }
.label { stroke: #fff; stroke-width: 4px; stroke-linejoin: round; paint-order: stroke }
@media (prefers-color-scheme: dark) { text { fill: #eee } .tick { fill: #aaa } .grid { stroke: #333 }
.ground { fill: #16181c } .label { stroke: #16181c } .mark { stroke: #16181c } }
"""


@dataclass(frozen=True)
class _Point:
    name: str
    look: MarkStyle
    size: float  # MB
    y: Interval


@dataclass(frozen=True)
class _Scale:
    """A linear scale, or with ``root`` one of square roots, which keeps zero and spreads small values."""

    low: float
    high: float
    begin: float
    end: float
    root: bool = False

    def __call__(self, value: float) -> float:
        share = max(value - self.low, 0.0) / (self.high - self.low)
        return self.begin + (self.end - self.begin) * (math.sqrt(share) if self.root else share)


def render(result: EvalResult) -> str:
    """An SVG document with a panel a metric of ``result.plotted``; panels stand above each other, so that it
    can be read on a phone.

    A metric without a value has no panel; a value that is infinite or not a number isn't drawn. A product
    of models and KV settings has a legend, a color a model and a shape a setting; else names stand beside
    their marks.
    """
    looks, keyed = styles(result.rows)
    infos = result.measured
    drawn = [(infos[key], points) for key in result.plotted
             if key in infos and (points := _points(result.rows, looks, key, infos[key]))]
    head, above = legend(result.rows, looks, 16, WIDTH - 6) if keyed and drawn else ("", 0)
    total = above + HEIGHT * len(drawn)
    axis = "weights and KV cache, MB" if any(row.kv_bytes for row in result.rows) else "weights on disk, MB"
    body = head + "".join(_panel(info, axis, points, above + HEIGHT * i, not keyed)
                          for i, (info, points) in enumerate(drawn))
    label = " and ".join(info.title for info, _ in drawn) or "nothing"
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {max(total, 1)}" '
            f'width="{WIDTH}" height="{max(total, 1)}" role="img" '
            f'aria-label={quoteattr(f"{label} against bytes")}>\n<style>{STYLE}</style>\n'
            f'<rect class="ground" width="{WIDTH}" height="{max(total, 1)}"/>\n{body}</svg>\n')


def _points(rows: Sequence[ModelResult], looks: Sequence[MarkStyle], key: str,
            info: MetricInfo) -> list[_Point]:
    factor = 100 if info.unit == "%" else 1
    return [_Point(name, look, (row.file_bytes + (row.kv_bytes or 0)) / 1e6,
                   Interval(factor * value.value, factor * value.low, factor * value.high))
            for name, look, row in zip(short_names(rows), looks, rows)
            if (value := row.metrics.get(key)) is not None and row.file_bytes is not None
            and all(map(math.isfinite, (value.value, value.low, value.high)))]


def _title(info: MetricInfo, root: bool) -> str:
    better = f"{info.direction} is better" if info.direction else ""
    return ", ".join(filter(None, (info.title, info.unit, better))) + (" (√ scale)" if root else "")


def _spreads(points: Sequence[_Point]) -> bool:
    """Whether small values would lie on each other: they are far below the largest."""
    values = [p.y.value for p in points if p.y.value > 0]
    return bool(values) and min(p.y.low for p in points) >= 0 and max(values) > 10 * min(values)


def _panel(info: MetricInfo, axis: str, points: Sequence[_Point], top: float, named: bool) -> str:
    root = info.direction == "lower" and _spreads(points)
    xs = _ticks(max(p.size for p in points))
    ys = _ticks(max(p.y.high for p in points), min(p.y.low for p in points))
    floor = top + HEIGHT - BOTTOM
    x = _Scale(0, xs[-1], LEFT, WIDTH - RIGHT)
    y = _Scale(ys[0], ys[-1], floor, top + TOP, root)
    title = _title(info, root)
    out = [f'<text class="title" x="16" y="{top + 26}">{escape(title)}</text>']
    for value in ys:
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" '
                   f'y2="{y(value):.1f}"/><text class="tick" x="{LEFT - 8}" y="{y(value) + 4:.1f}" '
                   f'text-anchor="end">{_tick(value)}</text>')
    for value in xs:
        out.append(f'<line class="axis" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{floor}" '
                   f'y2="{floor + 5}"/><text class="tick" x="{x(value):.1f}" y="{floor + 20}" '
                   f'text-anchor="middle">{_tick(value)}</text>')
    out.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{floor}" y2="{floor}"/>'
               f'<text class="tick" x="{WIDTH - RIGHT}" y="{floor + 40}" text-anchor="end">'
               f'{axis}</text>')
    marks = [(x(p.size), y(p.y.value), y(p.y.low), y(p.y.high)) for p in points]
    for point, (cx, _, low, high) in zip(points, marks):
        out.append(f'<line x1="{cx:.1f}" x2="{cx:.1f}" y1="{low:.1f}" y2="{high:.1f}" '
                   f'stroke="{point.look.color}" stroke-width="2"/>')
    out += [mark(point.look, cx, cy) for point, (cx, cy, _, _) in zip(points, marks)]
    if not named:
        return "\n".join(out) + "\n"
    inside = LabelBox(LEFT + 2, top + TOP - 12, WIDTH - 6, floor - 3)
    texts = [f"{cut(p.name, 24)} {number(p.y.value)}" for p in points]
    labels = place([(cx, cy) for cx, cy, _, _ in marks], texts, RADIUS, inside)
    for point, label, (cx, cy, _, _) in zip(points, labels, marks):
        out += _label(label, point.look.color, cx, cy)
    return "\n".join(out) + "\n"


def _label(label: PlotLabel, color: str, cx: float, cy: float) -> list[str]:
    """The text, and a line to its mark if it had to move away from it."""
    out = []
    if label.moved:
        out.append(f'<line x1="{cx:.1f}" y1="{cy:.1f}" x2="{label.x:.1f}" y2="{label.y - 5:.1f}" '
                   f'stroke="{color}"/>')
    out.append(f'<text class="label" x="{label.x:.1f}" y="{label.y:.1f}" '
               f'text-anchor="{label.anchor}">{escape(label.text)}</text>')
    return out


def _tick(value: float) -> str:
    """A round number as short as it goes: ``0.1``, ``300``."""
    return f"{value:.6g}"


def _ticks(high: float, low: float = 0.0) -> list[float]:
    """Round steps from 0 (or below ``low``, if that is negative) to ``high`` or above; about six."""
    high, low = max(high, 0.0), min(low, 0.0)
    if high == low:
        return [0.0, 1.0]
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    return [i * step for i in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)]


REPORTER = Reporter("svg", "plot.svg", render)
