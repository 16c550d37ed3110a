"""The static pictures ``frontier.svg`` and ``frontier.png``: the page's charts, drawn by vl-convert.

The same result gives the same bytes. Panels stand above each other, so that a phone shows them large enough.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.evaluation.metric_table import MetricInfo
from quantkit.evaluation.report.base import Reporter, shortened, text_name, variant_looks
from quantkit.evaluation.report.charts.base import Spec
from quantkit.evaluation.report.frontier import finite, frontiers
from quantkit.evaluation.result import PLOTTED, EvalResult, printable

WIDTH, HEIGHT = 500, 250
"""Of a panel without its axes."""
SCALE = 2
"""Pixels of the PNG for each of the SVG."""
INK = "#1c1d1f"
SOFT = "#5c6067"
LINE = "#dfe0dc"
RADIUS = 5.0
TEXT_HEIGHT = 11.0
LETTER = 5.2
LETTERS = 30
"""Pixels from a mark's middle to its edge, of a name's height and of a letter; letters of a name, at most."""
_STEPS = (0, 5, 11)
_ANGLES = tuple(math.radians(degrees) for degrees in (0, 180, 270, 90, 325, 35, 215, 145, 300, 60, 240, 120))
NOTHING = "nothing was measured that can be drawn"


def svg(result: EvalResult) -> str:
    import vl_convert

    return vl_convert.vegalite_to_svg(_harmless(picture(result)))


def png(result: EvalResult) -> bytes:
    import vl_convert

    return vl_convert.vegalite_to_png(_harmless(picture(result)), scale=SCALE)


def _harmless(spec: Any) -> Any:
    """A specification whose texts XML can hold: a name may be a stranger's."""
    if isinstance(spec, dict):
        return {key: _harmless(value) for key, value in spec.items()}
    if isinstance(spec, list):
        return [_harmless(value) for value in spec]
    return printable(spec) if isinstance(spec, str) and not spec.isprintable() else spec


def picture(result: EvalResult) -> Spec:
    """The Vega-Lite specification: a panel for each picture of the frontier, and one for each further metric
    that is asked for, against bytes."""
    from quantkit.evaluation.report.charts.frontier import frontier_spec, metric_spec

    looks = variant_looks(result.rows)
    panels = [(frontier_spec(result, frontier, looks),
               f"KL against {frontier.title} ({'right' if frontier.higher else 'left'} and down is better)")
              for frontier in frontiers(result)]
    panels += [(metric_spec(result, key, info, looks), ", ".join(filter(None, (
        info.title, info.unit, f"{info.direction} is better" * bool(info.direction)))))
        for key, info in _further(result)]
    title = {"text": _title(result), "subtitle": _small_print(result), "anchor": "start", "fontSize": 15,
             "color": INK, "subtitleColor": SOFT, "subtitleFontSize": 9.5, "subtitlePadding": 6, "offset": 14}
    if not panels:
        return {"title": title, "width": WIDTH, "height": 60, "data": {"values": [{}]}, "mark": {
            "type": "text", "text": NOTHING, "color": SOFT}, "view": {"stroke": None}}
    parts = []
    for spec, caption in panels:
        spec["layer"].append(names_layer(spec))
        for layer in spec["layer"]:  # layers and data sets of two panels have the same names
            layer.pop("name", None)
            if "name" in layer["data"]:
                layer["data"] = {"values": spec["datasets"][layer["data"]["name"]]}
        for key in ("autosize", "$schema", "datasets"):
            del spec[key]
        parts.append({**spec, "width": WIDTH, "height": HEIGHT, "title": {
            "text": caption, "anchor": "start", "fontSize": 12, "color": INK}})
    return {"title": title, "vconcat": parts, "spacing": 28, "background": "white",
            "padding": 12, "config": _CONFIG, "resolve": {"legend": {"color": "shared", "shape": "shared"}}}


_CONFIG: dict[str, Any] = {
    "font": "sans-serif", "view": {"stroke": None},
    "axis": {"labelColor": SOFT, "titleColor": SOFT, "gridColor": LINE, "tickColor": "#8b9096",
             "domainColor": "#8b9096", "labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": "normal"},
    "axisQuantitative": {"tickCount": 7},
    "legend": {"orient": "bottom", "direction": "horizontal", "columns": 4, "labelColor": INK,
               "labelFontSize": 11, "labelLimit": 200, "symbolSize": 80, "symbolOpacity": 1,
               "columnPadding": 14, "rowPadding": 3, "offset": 8}}


def names_layer(spec: Spec) -> Spec:
    """A layer with the variants' names beside their marks, where they cover no mark, range, line or other
    name; those of the frontier first. A name that finds no room near its mark is left out. (On the page Vega
    does this in the browser, by ``report.js``.)"""
    layers = {layer.get("name"): layer for layer in spec["layer"]}
    encoding = layers["best" if "best" in layers else "dominated"]["encoding"]
    to_x, to_y = _pixels(encoding["x"]["scale"], WIDTH), _pixels(encoding["y"]["scale"], -HEIGHT)
    field = encoding["y"]["field"]

    def rows(name: str) -> list[dict[str, Any]]:
        return spec["datasets"][layers[name]["data"]["name"]] if name in layers else []

    def place(row: dict[str, Any], x: str = "cost", y: str = field) -> tuple[float, float]:
        return to_x(row[x]), to_y(row[y])

    lines = [(place(row, y="low"), place(row, y="high")) for row in rows("ranges")]
    lines += [(place(row, "from"), place(row, "to")) for row in rows("spans")]
    before = "stair" in layers and layers["stair"]["mark"]["interpolate"] == "step-before"
    for first, second in itertools.pairwise(map(place, rows("stair"))):
        corner = (first[0], second[1]) if before else (second[0], first[1])
        lines += [(first, corner), (corner, second)]
    named = [(row, ink) for name, ink in (("best", INK), ("dominated", SOFT)) for row in rows(name)]
    taken = []
    for row, _ in named:
        x, y = place(row)
        taken.append((x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS))
    for row in rows("floor"):
        y = to_y(row[field])
        lines.append(((0, y), (WIDTH, y)))
        taken.append((0, y, 4 + LETTER * 1.15 * len(row["text"]), y + 18))
    covered = np.concatenate([np.linspace(*line, num=60) for line in lines]) if lines else np.empty((0, 2))
    texts = []
    for row, ink in named:
        text = shortened(str(row["variant"]), LETTERS)
        x, y = place(row)
        if (box := _room(x, y, LETTER * len(text), np.array(taken), covered)) is not None:
            taken.append(box)
            left, top, right, bottom = box
            align = "left" if left > x else "right" if right < x else "center"
            texts.append({"text": text, "ink": ink, "y": (top + bottom) / 2, "align": align,
                          "x": {"left": left, "right": right, "center": (left + right) / 2}[align]})
    pixels: dict[str, Any] = {"type": "quantitative", "scale": None, "axis": None}
    return {"data": {"values": texts},
            "mark": {"type": "text", "align": {"expr": "datum.align"}, "baseline": "middle", "fontSize": 10},
            "encoding": {"x": {"field": "x", **pixels}, "y": {"field": "y", **pixels},
                         "text": {"field": "text"},
                         "color": {"field": "ink", "type": "nominal", "scale": None, "legend": None}}}


def _pixels(scale: dict[str, Any], size: float) -> Callable[[float], float]:
    """Value → pixel; a negative size: from the bottom up."""
    low, high = scale["domain"]
    if scale.get("type") == "log":
        return lambda value: max(-size, 0) + size * math.log(value / low) / math.log(high / low)
    return lambda value: max(-size, 0) + size * (value - low) / (high - low)


def _room(x: float, y: float, width: float, taken: NDArray[np.float64],
          covered: NDArray[np.float64]) -> tuple[float, float, float, float] | None:
    """The nearest free place for a text beside a mark: left, top, right, bottom; ``None``: there is none."""
    best, least = None, math.inf
    for step, (turn, angle) in itertools.product(_STEPS, enumerate(_ANGLES)):
        cos, sin = math.cos(angle), math.sin(angle)
        left = x + (RADIUS + 3 + step) * cos - width * (1 - cos) / 2
        top = y + (RADIUS + 3 + step) * sin - TEXT_HEIGHT * (1 - sin) / 2
        right, bottom = left + width, top + TEXT_HEIGHT
        if left < 2 or top < 0 or right > WIDTH + 10 or bottom > HEIGHT - 2:
            continue
        overlaps = ((taken[:, 0] < right) & (taken[:, 2] > left) & (taken[:, 1] < bottom)
                    & (taken[:, 3] > top)).any()
        covers = ((covered[:, 0] > left) & (covered[:, 0] < right) & (covered[:, 1] > top)
                  & (covered[:, 1] < bottom)).any()
        if not overlaps and not covers and step + turn / 4 < least:
            best, least = (left, top, right, bottom), step + turn / 4
    return best


def _further(result: EvalResult) -> list[tuple[str, MetricInfo]]:
    """Metrics that have a panel of their own: those that were asked for, and if KL can't be drawn, also those
    that are drawn by default."""
    if result.plotted == PLOTTED and frontiers(result):
        return []
    infos = result.measured
    return [(key, infos[key]) for key in result.plotted if key in infos and any(
        finite(row.metrics.get(key)) and row.memory_bytes for row in result.rows)]


def _title(result: EvalResult) -> str:
    """The model, and what is shown of it."""
    if not result.rows:
        return "Quality, speed and memory"
    return shortened(variant_looks(result.rows)[0].model, 34) + ": quality, speed and memory"


def _small_print(result: EvalResult) -> list[str]:
    protocol = result.protocol
    names = ", ".join(name for name, *_ in protocol.texts) or text_name(protocol.text)
    texts = (f"{names}, {protocol.scored} predictions a variant; reference: the first variant",
             f"{protocol.gpu or protocol.cpu}, {protocol.threads} threads; quantkit {protocol.quantkit}; "
             f"fingerprint {protocol.fingerprint}")
    return [shortened(printable(text), 104) for text in texts]


SVG = Reporter("svg", "frontier.svg", svg)
PNG = Reporter("png", "frontier.png", png)
