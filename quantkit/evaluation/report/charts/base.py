"""What all charts share: data inside the specification, the width of the page, and how variants look."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import altair as alt

from quantkit.evaluation.report.base import COLORS, VariantLook
from quantkit.evaluation.result import EvalResult
from quantkit.evaluation.speed.results import SpeedSweep

Spec = dict[str, Any]
HEIGHT = 320
_LISTED = 14
"""More models than this are too many for a legend; tooltips name them."""
GREY = "#85898d"
"""Seen on light and dark grounds."""


def inline(rows: Sequence[Mapping[str, object]]) -> alt.InlineData:
    """Data that stands in the specification; what isn't finite is left out."""
    return alt.InlineData(values=[{key: value for key, value in row.items()
                                   if not isinstance(value, float) or math.isfinite(value)} for row in rows])


def finished(chart: alt.Chart | alt.LayerChart | alt.FacetChart, description: str,
             height: int = HEIGHT) -> Spec:
    """The specification; the page makes it as wide as there is room."""
    sized = chart.properties(width=640, height=height, description=description,
                             autosize=alt.AutoSizeParams(type="fit-x", contains="padding"))
    spec: Spec = sized.to_dict()
    spec.pop("config", None)  # colors and fonts are the page's
    return spec


def by_model(looks: Sequence[VariantLook]) -> alt.Color:
    colors = {look.model: look.color for look in looks}
    return alt.Color("model:N", title=None, scale=alt.Scale(domain=list(colors), range=list(colors.values())),
                     legend=alt.Legend(symbolType="circle", symbolStrokeWidth=0)
                     if 1 < len(colors) <= _LISTED else None)


def by_setting(looks: Sequence[VariantLook]) -> alt.Shape:
    shapes = {look.setting: look.shape for look in looks}
    return alt.Shape("setting:N", title=None, legend=_setting_legend(len(shapes)),
                     scale=alt.Scale(domain=list(shapes), range=list(shapes.values())))


def _setting_legend(count: int) -> alt.Legend | None:
    return alt.Legend(labelExpr="'KV ' + datum.label", symbolFillColor="transparent", symbolStrokeColor=GREY,
                      symbolStrokeWidth=1.5, symbolDash=[1, 0]) if count > 1 else None


def dash_by_setting(looks: Sequence[VariantLook]) -> alt.StrokeDash:
    """Dashes: a KV setting's, beside its shape."""
    patterns = ([1, 0], [6, 3], [2, 2], [8, 2, 2, 2], [4, 4], [1, 3], [10, 4], [3, 1])
    settings = list(dict.fromkeys(look.setting for look in looks))
    return alt.StrokeDash("setting:N", title=None, legend=_setting_legend(len(settings)), scale=alt.Scale(
        domain=settings, range=[patterns[index % len(patterns)] for index in range(len(settings))]))


def identity(look: VariantLook) -> dict[str, object]:
    """The fields that say which variant a mark is."""
    return {"variant": look.name, "model": look.model, "setting": look.setting}


def timed(result: EvalResult, looks: Sequence[VariantLook]) -> Iterator[tuple[VariantLook, SpeedSweep]]:
    """The variants whose speed was measured."""
    for row, look in zip(result.rows, looks):
        if row.speed is not None:
            yield look, row.speed


def by_name(field: str, names: Sequence[str], colors: Sequence[str] = COLORS) -> alt.Color:
    """Color: each name's, which repeat after the last one."""
    return alt.Color(f"{field}:N", title=None, scale=alt.Scale(
        domain=list(names), range=[colors[index % len(colors)] for index in range(len(names))]))


def variant_axis(looks: Sequence[VariantLook], padding: float | None = None) -> alt.Y:
    """A row a variant."""
    scale = alt.Undefined if padding is None else alt.Scale(paddingInner=padding)
    return alt.Y("variant:N", sort=[look.name for look in looks], axis=names_axis(), scale=scale)


def log_scale(low: float, high: float) -> alt.Scale:
    return alt.Scale(type="log", domain=[low, high], nice=False)


def names_axis() -> alt.Axis:
    """An axis with names; where there is little room, a KV setting stands below its model."""
    return alt.Axis(title=None, ticks=False, domain=False, grid=False, labelExpr=(
        "width < 400 ? split(replace(datum.label, ' kv ', '|kv '), '|') : datum.label"))


def log_axis(low: float, high: float, form: str = "~g") -> alt.Axis:
    """A logarithmic axis with few numbers: powers of ten, and 2 and 5 between them if those are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low < 60 else (1,)
    values = [float(f"{step}e{power}") for power in powers for step in steps]
    return alt.Axis(values=[value for value in values if low <= value <= high], format=form)
