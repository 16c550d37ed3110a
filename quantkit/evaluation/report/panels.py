"""Panels of the static pictures: KL against one other quantity, and any metric against bytes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quantkit.evaluation.metric_table import MetricInfo
from quantkit.evaluation.report.base import head, number
from quantkit.evaluation.report.figure import GREY, INK, LINE, SOFT, drawable
from quantkit.evaluation.report.frontier import Frontier, finite
from quantkit.evaluation.report.labels import LabelBox, LabelRequest, place_labels
from quantkit.evaluation.report.looks import VariantLook, shortened
from quantkit.evaluation.result import EvalResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

RADIUS = 4.2
"""Of a mark, in points."""
_LABEL, _LETTERS = 8.0, 30
_BAR_POINTS = 21
"""Of a range's bar, for labels to keep away from."""


def frontier_panel(axes: Axes, frontier: Frontier, looks: Sequence[VariantLook]) -> None:
    """KL on a logarithmic axis, the better the lower, against speed or bytes; the frontier as a stair: what
    lies on its good side was reached by no variant."""
    floor = frontier.floor
    frame(axes, f"KL against {frontier.title}", "KL, nats (log)", frontier.title)
    axes.set_yscale("log")
    points = frontier.points
    xs = [point.cost.value for point in points]
    ys = [floor.at_least(point.quality.value) for point in points]
    axes.set_ylim(min(floor.value * 0.4, *ys), max(*ys, floor.value * 10,
                                                   *(point.quality.high for point in points)) * 1.7)
    axes.set_xlim(*frontier.span)
    _ticks(axes)
    if floor.noise is not None and floor.noise.low > 0:
        axes.axhspan(floor.noise.low, floor.noise.high, color="#56B4E9", alpha=0.25, lw=0)
    axes.axhline(floor.value, color=SOFT, lw=0.8, ls=(0, (4, 3)))
    axes.annotate(floor.label, (0, floor.value), (4, -5), xycoords=("axes fraction", "data"),
                  textcoords="offset points", va="top", size=7, color=SOFT)
    line = frontier.line
    axes.plot([point.cost.value for point in line], [floor.at_least(point.quality.value) for point in line],
              drawstyle="steps-pre" if frontier.higher else "steps-post", color=INK, lw=1.2, alpha=0.75,
              zorder=2)
    axes.annotate("better ↘" if frontier.higher else "↙ better", (1, 1), (-8, 5), xycoords="axes fraction",
                  textcoords="offset points", ha="right", size=8, color=SOFT)
    bars: list[tuple[float, float]] = []
    for point, x, y in zip(points, xs, ys):
        look = looks[point.index]
        errors: dict[str, Any] = {"xerr": _error(x, point.cost.low, point.cost.high)}
        bars += [(_between(point.cost.low, point.cost.high, step), y) for step in range(_BAR_POINTS)]
        if point.quality.value >= floor.value:
            low, high = floor.at_least(point.quality.low), point.quality.high
            errors["yerr"] = _error(y, low, high)
            bars += [(x, _between(low, high, step)) for step in range(_BAR_POINTS)]
        _mark(axes, x, y, look, point.dominated, errors)
    _name(axes, xs, ys, [looks[point.index].name for point in points],
          [point.dominated for point in points], [*_stair(frontier, axes.get_xlim()), *bars])


def metric_panel(axes: Axes, result: EvalResult, key: str, info: MetricInfo,
                 looks: Sequence[VariantLook]) -> None:
    """A metric against bytes of weights and KV cache."""
    factor = 100 if info.unit == "%" else 1
    cached = any(row.kv_bytes for row in result.rows)
    title = ", ".join(filter(None, (info.title, info.unit,
                                    f"{info.direction} is better" * bool(info.direction))))
    frame(axes, drawable(title), drawable(", ".join(filter(None, head(info)))),
          "weights and KV cache, GB" if cached else "weights, GB")
    xs, ys, names = [], [], []
    for row, look in zip(result.rows, looks):
        interval = row.metrics.get(key)
        if interval is None or row.memory_bytes is None or not finite(interval):
            continue
        x, y = row.memory_bytes / 1e9, factor * interval.value
        _mark(axes, x, y, look, False, {"yerr": _error(y, factor * interval.low, factor * interval.high)})
        xs.append(x)
        ys.append(y)
        names.append(f"{look.name}  {number(y)}")
    axes.margins(0.12, 0.18)
    if max(ys) == min(ys):
        axes.set_ylim(ys[0] - (abs(ys[0]) or 1) * 0.5, ys[0] + (abs(ys[0]) or 1) * 0.5)
    _name(axes, xs, ys, names, [False] * len(xs), [])


def legend(looks: Sequence[VariantLook]) -> list[list[Line2D]]:
    """What colors and shapes mean, if there are several KV settings; else names stand beside marks."""
    from matplotlib.lines import Line2D

    settings = {look.setting: look for look in looks}
    if len(settings) < 2:
        return []
    models = {look.model: look for look in looks}
    return [[Line2D([], [], ls="", marker="o", ms=6, mfc=look.color, mec=look.color, label=_text(name, 34))
             for name, look in list(models.items())[:14]],
            [Line2D([], [], ls="", marker=look.marker, ms=6, mfc="white", mec=INK,
                    label=_text(f"KV {name}" if name else "KV not set", 34))
             for name, look in list(settings.items())[:8]]]


def frame(axes: Axes, title: str, y: str, x: str) -> None:
    """Axes with as little ink as it takes."""
    axes.set_title(title, loc="left", size=10.5, weight="bold", color=INK, pad=6, parse_math=False)
    axes.set_ylabel(y, size=9, color=SOFT, parse_math=False)
    axes.set_xlabel(x, size=9, color=SOFT, parse_math=False)
    axes.tick_params(which="both", colors=SOFT, labelsize=8.5, length=3)
    axes.grid(color=LINE, lw=0.7)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_color("#8b9096")
        spine.set_visible(side in ("left", "bottom"))


def _text(name: str, limit: int = _LETTERS) -> str:
    # a legend leaves out what begins with an underscore
    return " " * name.startswith("_") + shortened(drawable(name), limit).replace("$", r"\$")


def _ticks(axes: Axes) -> None:
    """Numbers as they are written elsewhere, not powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axes.get_ylim()
    narrow = high / low < 100
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _plain(value: float) -> str:
    if not 1e-6 <= value < 1e5:
        return f"{value:.0e}"
    return f"{value:.6f}".rstrip("0").rstrip(".")


def _between(low: float, high: float, step: int) -> float:
    return low + (high - low) * step / (_BAR_POINTS - 1)


def _error(value: float, low: float, high: float) -> list[list[float]]:
    return [[max(0.0, value - low)], [max(0.0, high - value)]]


def _mark(axes: Axes, x: float, y: float, look: VariantLook, dominated: bool, errors: dict[str, Any]) -> None:
    axes.errorbar(x, y, **errors, fmt="none", ecolor=GREY if dominated else look.color, elinewidth=0.9,
                  alpha=0.9, zorder=3)
    axes.plot(x, y, ls="", marker=look.marker, ms=2 * RADIUS - (look.marker == "D") * 1.6, zorder=4,
              mfc="#e9eaeb" if dominated else look.color, mec=look.color if dominated else "white",
              mew=0.9 if dominated else 0.7)


def _stair(frontier: Frontier, ends: tuple[float, float]) -> list[tuple[float, float]]:
    """Points along the frontier's line and the floor, for labels to keep away from."""
    floor, line = frontier.floor, frontier.line
    points = [(ends[0] + (ends[1] - ends[0]) * step / 60, floor.value * below)
              for below, part in ((1.0, 61), (0.8, 30), (0.65, 30)) for step in range(part)]
    for first, second in itertools.pairwise(line):
        x, y = (first.cost.value, second.quality.value) if frontier.higher else (
            second.cost.value, first.quality.value)
        corner = (x, floor.at_least(y))
        for start, end in (((first.cost.value, floor.at_least(first.quality.value)), corner),
                           (corner, (second.cost.value, floor.at_least(second.quality.value)))):
            points += [(start[0] + (end[0] - start[0]) * step / 40,
                        start[1] * (end[1] / start[1]) ** (step / 40)) for step in range(41)]
    return points


def _name(axes: Axes, xs: Sequence[float], ys: Sequence[float], names: Sequence[str],
          dominated: Sequence[bool],
          avoid: Sequence[tuple[float, float]]) -> None:
    """Names beside the marks; of dominated variants only where there is room."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = axes.get_figure(root=True)
    if figure is None:
        return
    renderer = FigureCanvasAgg(figure).get_renderer()
    scale = figure.dpi / 72
    pixels = axes.transData.transform(list(zip(xs, ys)))
    texts = [shortened(drawable(name), _LETTERS) for name in names]
    sizes = []
    for text in texts:
        label = axes.text(0, 0, text, size=_LABEL, parse_math=False)
        extent = label.get_window_extent(renderer)
        sizes.append((extent.width + 2 * scale, extent.height))
        label.remove()
    bounds = axes.get_window_extent(renderer)
    inside = LabelBox(bounds.x0 + 2, bounds.y0 + 2, bounds.x1 + RIGHT_MARGIN * scale, bounds.y1)
    requests = [LabelRequest(x, y, width, height, not grey)
                for (x, y), (width, height), grey in zip(pixels, sizes, dominated)]
    away = [tuple(point) for point in axes.transData.transform(list(avoid))] if avoid else []
    places = place_labels(requests, RADIUS * scale, inside, [(x, y) for x, y in away])
    for spot, (x, y), text, place, grey in zip(zip(xs, ys), pixels, texts, places, dominated):
        if place is None:
            continue
        middle = ((place.left + place.right) / 2, (place.bottom + place.top) / 2)
        anchor = (min(max(x, place.left), place.right), min(max(y, place.bottom), place.top))
        if math.hypot(anchor[0] - x, anchor[1] - y) > (RADIUS + 10) * scale:
            end = axes.transData.inverted().transform(anchor)
            axes.plot([spot[0], end[0]], [spot[1], end[1]], color=GREY, lw=0.6, zorder=1)
        axes.annotate(text, spot, ((middle[0] - x) / scale, (middle[1] - y) / scale),
                      textcoords="offset points", ha="center", va="center", size=_LABEL, parse_math=False,
                      color="#85898d" if grey else INK, zorder=5,
                      bbox={"facecolor": "white", "alpha": 0.7, "lw": 0, "pad": 0.4})


RIGHT_MARGIN = 8
"""Points right of the axes that labels may reach into."""
