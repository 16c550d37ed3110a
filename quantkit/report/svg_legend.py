"""Marks by color and shape, and what they mean: for plots with more points than labels have room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from quantkit.evaluate.result import ModelResult
from quantkit.report.base import short_names
from quantkit.report.svg_labels import cut, reach

COLORS = ("#4e79a7", "#e15759", "#2a8f5b", "#b07aa1", "#c07c1e", "#3d9aa0", "#9c755f", "#d37295")
RADIUS = 6
LINE, GAP = 26, 22
SHAPES = ("", "M-5.5,-5.5h11v11h-11z", "M0,-7L7,5.5H-7z", "M0,-7.5L7.5,0L0,7.5L-7.5,0z", "M0,7L7,-5.5H-7z",
          "M-2.2,-7h4.4v4.8h4.8v4.4h-4.8v4.8h-4.4v-4.8h-4.8v-4.4h4.8z")
"""Around the origin; the first is a circle."""


@dataclass(frozen=True)
class MarkStyle:
    """How a row's mark looks."""

    color: str
    shape: int = 0


def styles(rows: Sequence[ModelResult]) -> tuple[list[MarkStyle], bool]:
    """A style a row, and whether it needs a legend: a model's color and a KV setting's shape if each of
    several models has several settings, else a color a row, whose name stands beside its mark."""
    models, settings = (list(dict.fromkeys(values)) for values in
                        ((row.model for row in rows), (row.kv for row in rows)))
    if min(len(models), len(settings)) < 2:
        return [MarkStyle(COLORS[i % len(COLORS)]) for i in range(len(rows))], False
    return [MarkStyle(COLORS[models.index(row.model) % len(COLORS)], settings.index(row.kv) % len(SHAPES))
            for row in rows], True


def mark(style: MarkStyle, x: float, y: float) -> str:
    """An SVG element, around the point."""
    if not SHAPES[style.shape]:
        return f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS}" fill="{style.color}"/>'
    return (f'<path class="mark" transform="translate({x:.1f},{y:.1f})" d="{SHAPES[style.shape]}" '
            f'fill="{style.color}"/>')


def legend(rows: Sequence[ModelResult], looks: Sequence[MarkStyle], left: float,
           right: float) -> tuple[str, float]:
    """Models, then KV settings, each group on lines of its own; and the height."""
    names = {}
    for name, row in zip(short_names(rows), rows):
        names[row.model] = name.removesuffix(f" kv {row.kv}")
    colors = {names[row.model]: MarkStyle(look.color) for row, look in zip(rows, looks)}
    shapes = {f"kv {row.kv}": MarkStyle("#888", look.shape) for row, look in zip(rows, looks)}
    out, y = [], 4.0
    for group in (colors, shapes):
        x, y = left, y + LINE
        for name, style in group.items():
            text = cut(name, 34)
            if x > left and x + 14 + reach(text) > right:
                x, y = left, y + LINE
            out.append(f'{mark(style, x + RADIUS, y - 5)}<text class="label" x="{x + 18:.1f}" y="{y}">'
                       f'{escape(text)}</text>')
            x += 18 + reach(text) + GAP
    return "\n".join(out) + "\n", y + 12
