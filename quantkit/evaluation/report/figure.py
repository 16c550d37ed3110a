"""The static pictures: ``frontier.svg`` and ``frontier.png``, drawn by matplotlib.

Neither pyplot nor the user's own settings of matplotlib are used or changed, and the same result gives the
same bytes. Letters are drawn as paths, so that the picture looks the same without any font.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quantkit.evaluation.metric_table import MetricInfo
from quantkit.evaluation.report.base import Reporter, text_name
from quantkit.evaluation.report.frontier import finite, frontiers
from quantkit.evaluation.report.looks import shortened, variant_looks
from quantkit.evaluation.result import PLOTTED, EvalResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, PANEL, HEAD, FOOT = 6.6, 3.45, 0.42, 0.52
"""Inches: of the figure, of a panel with its axis, of the title, and of the small print."""
LEFT, RIGHT, BELOW, ABOVE = 0.72, 0.16, 0.52, 0.36
"""Inches around a panel's axes."""
INK, SOFT, LINE, GREY = "#1c1d1f", "#5c6067", "#dfe0dc", "#b4b7ba"
_LEGEND_LINE = 0.18
_DPI = 200


def svg(result: EvalResult) -> str:
    """The picture as SVG."""
    with _settings():
        buffer = io.StringIO()
        draw(result).savefig(buffer, format="svg", metadata={"Date": None, "Title": _title(result)})
        return buffer.getvalue()


def png(result: EvalResult) -> bytes:
    """The picture as PNG, 1320 pixels wide."""
    with _settings():
        buffer = io.BytesIO()
        draw(result).savefig(buffer, format="png", dpi=_DPI,
                             metadata={"Title": _title(result), "Software": None})
        return buffer.getvalue()


@contextmanager
def _settings() -> Iterator[None]:
    """matplotlib's defaults, whatever the user's are, and SVG without anything random."""
    from matplotlib import style

    with style.context(["default", {"svg.hashsalt": "quantkit", "svg.fonttype": "path",
                                    "font.family": "DejaVu Sans", "font.size": 9.5}]):
        yield


def draw(result: EvalResult) -> Figure:
    """The figure: a panel for each picture of the frontier, and one for each further metric that is asked
    for, against bytes. Panels stand above each other, so that a phone shows them large enough."""
    from matplotlib.figure import Figure

    from quantkit.evaluation.report.panels import frontier_panel, legend, metric_panel

    looks = variant_looks(result.rows)
    pictures, metrics = frontiers(result), _further(result)
    keys = legend(looks) if pictures or metrics else []
    columns = [_legend_columns([str(handle.get_label()) for handle in handles]) for handles in keys]
    lines = [-(-len(handles) // count) for handles, count in zip(keys, columns)]
    above = HEAD + (sum(lines) * _LEGEND_LINE + 0.06 * len(lines))
    height = above + PANEL * max(len(pictures) + len(metrics), 1) + FOOT
    figure = Figure(figsize=(WIDTH, height), facecolor="white")
    _write(figure, 1 - 0.27 / height, _title(result), 12.5, color=INK, weight="bold")
    top = HEAD + 0.02
    for handles, count, used in zip(keys, columns, lines):
        figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.06 / WIDTH, 1 - top / height),
                      ncols=count, frameon=False, fontsize=8.5, handletextpad=0.3, columnspacing=1.2,
                      borderpad=0.1, labelspacing=0.35, labelcolor=INK)
        top += used * _LEGEND_LINE + 0.04
    for number in range(len(pictures) + len(metrics)):
        top = height - above - number * PANEL
        axes = figure.add_axes((LEFT / WIDTH, (top - PANEL + BELOW) / height, (WIDTH - LEFT - RIGHT) / WIDTH,
                                (PANEL - BELOW - ABOVE) / height))
        if number < len(pictures):
            frontier_panel(axes, pictures[number], looks)
        else:
            key, info = metrics[number - len(pictures)]
            metric_panel(axes, result, key, info, looks)
    if not pictures and not metrics:
        figure.text(0.5, 0.5, "nothing was measured that can be drawn", ha="center", color=SOFT)
    for number, text in enumerate(_small_print(result)):
        _write(figure, (FOOT - 0.2 - 0.16 * number) / height, text, 7, color=SOFT)
    return figure


def _write(figure: Figure, y: float, text: str, size: float, color: str, weight: str = "normal") -> None:
    """A line from the left edge, smaller if it would not fit."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    label = figure.text(0.16 / WIDTH, y, text, size=size, color=color, weight=weight, va="center",
                        parse_math=False)
    width = label.get_window_extent(FigureCanvasAgg(figure).get_renderer()).width
    label.set_fontsize(size * min(1.0, (WIDTH - 0.3) * figure.dpi / max(width, 1.0)))


def _further(result: EvalResult) -> list[tuple[str, MetricInfo]]:
    """Metrics that have a panel of their own: those that were asked for, and if KL can't be drawn, also those
    that are drawn by default."""
    if result.plotted == PLOTTED and frontiers(result):
        return []
    infos = result.measured
    return [(key, infos[key]) for key in result.plotted
            if key in infos and any(finite(row.metrics.get(key)) for row in result.rows)]


def _title(result: EvalResult) -> str:
    """The model, and what is shown of it."""
    if not result.rows:
        return "Quality, speed and memory"
    model = variant_looks(result.rows)[0].model
    return shortened(drawable(model), 34) + ": quality, speed and memory"


def _small_print(result: EvalResult) -> list[str]:
    protocol = result.protocol
    machine = protocol.gpu or protocol.cpu
    names = ", ".join(name for name, *_ in protocol.texts) or text_name(protocol.text)
    texts = (f"{names}, {protocol.scored} predictions a variant; reference: the first variant",
             f"{machine}, {protocol.threads} threads; quantkit {protocol.quantkit}; "
             f"fingerprint {protocol.fingerprint}")
    return [shortened(drawable(text), 110) for text in texts]


def _legend_columns(texts: list[str]) -> int:
    longest = max(map(len, texts), default=1)
    return max(1, min(5, int((WIDTH - 0.2) / (0.4 + 0.068 * longest))))


def drawable(text: str) -> str:
    """The text with a replacement for what matplotlib's own font has no glyph of, on one line."""
    glyphs = _glyphs()
    return "".join(char if ord(char) in glyphs and char.isprintable() else "\ufffd" for char in text)


@functools.cache
def _glyphs() -> frozenset[int]:
    """Characters of the font that matplotlib brings."""
    from matplotlib.font_manager import findfont
    from matplotlib.ft2font import FT2Font

    return frozenset(FT2Font(findfont("DejaVu Sans")).get_charmap())


SVG = Reporter("svg", "frontier.svg", svg)
PNG = Reporter("png", "frontier.png", png)
