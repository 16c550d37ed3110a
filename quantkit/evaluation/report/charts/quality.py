"""Charts of quality: a row a text, tasks in pairs, and the map of sensitive layers."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import altair as alt

from quantkit.evaluation.metrics import KL
from quantkit.evaluation.report.base import VariantLook, number, shown, tasks_of, text_name
from quantkit.evaluation.report.charts.base import (
    Spec,
    by_model,
    by_name,
    by_setting,
    finished,
    identity,
    inline,
    log_axis,
    log_scale,
    names_axis,
    variant_axis,
)
from quantkit.evaluation.report.frontier import finite, quality_floor
from quantkit.evaluation.report.quality_grids import info_of, verdict
from quantkit.evaluation.result import EvalResult

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.(.+)$")


def texts_spec(result: EvalResult, looks: Sequence[VariantLook]) -> Spec | None:
    """KL, a row a text."""
    floor = quality_floor(result)
    rows = []
    for row, look in zip(result.rows, looks):
        for text, metrics in row.texts.items():
            interval = metrics.get(KL.name)
            if interval is not None and finite(interval) and interval.value > 0:
                value, span = shown(interval, info_of(result, KL.name))
                rows.append({**identity(look), "text": text_name(text), "kl": floor.at_least(interval.value),
                             "KL": value, "interval": span})
    if not rows:
        return None
    ends = [float(str(row["kl"])) for row in rows]
    low, high = min(ends) / 1.2, max(ends) * 1.2
    order = list(dict.fromkeys(text_name(text) for row in result.rows for text in row.texts))
    chart = alt.Chart(inline(rows)).mark_point(filled=True, size=80, opacity=0.85).encode(
        x=alt.X("kl:Q", title="KL, nats (log)", axis=log_axis(low, high), scale=log_scale(low, high)),
        y=alt.Y("text:N", sort=order, axis=names_axis()), color=by_model(looks), shape=by_setting(looks),
        tooltip=["variant:N", "text:N", "KL:N", "interval:N"])
    return finished(chart, "KL of each variant on each text.", 34 * len(order))


def tasks_spec(result: EvalResult, looks: Sequence[VariantLook]) -> Spec | None:
    """Differences to the reference in points with their 95% intervals; without paired tests, no chart."""
    tasks = tasks_of(result)
    rows = []
    for row, look in zip(result.rows, looks):
        for test in row.differences:
            if test.metric not in tasks or test.text:
                continue
            factor = 100 if tasks[test.metric].unit == "%" else 1
            change, low, high = (factor * part for part in (test.difference, test.low, test.high))
            rows.append({**identity(look), "task": tasks[test.metric].title, "change": change, "low": low,
                         "high": high, "verdict": verdict(result, test),
                         "difference": f"{number(change)} ({number(low)} to {number(high)})"})
    if not rows:
        return None
    names = list(dict.fromkeys(str(row["task"]) for row in rows))
    offset = alt.YOffset("task:N", sort=names, scale=alt.Scale(paddingOuter=0.2))
    base = alt.Chart(inline(rows)).encode(y=variant_axis(looks, 0.25), yOffset=offset,
                                          color=by_name("task", names))
    zero = alt.Chart(inline([{"change": 0}])).mark_rule(opacity=0.7).encode(x="change:Q")
    chart = alt.layer(
        zero, base.mark_rule(strokeWidth=1.5).encode(
            x=alt.X("low:Q", title="difference to the reference, points"), x2="high:Q"),
        base.mark_point(filled=True, size=55, opacity=1).encode(
            x="change:Q", shape=alt.Shape("task:N", title=None, scale=alt.Scale(domain=names)),
            tooltip=["variant:N", "task:N", "difference:N", "verdict:N"]))
    return finished(chart, "Differences of task scores to the reference, in pairs.",
                    len({row["variant"] for row in rows}) * (10 * len(names) + 12))


def sensitivity_spec(result: EvalResult) -> Spec | None:
    """A heat map: layers across, kinds of Linears down."""
    rows = []
    for name, nats in result.sensitivity:
        match = _LAYER.search(name)
        if match is not None and 0 < nats < math.inf:
            rows.append({"layer": int(match[1]),
                         "kind": match[2].removeprefix("self_attn.").removeprefix("mlp."),
                         "nats": float(nats), "KL": f"{number(nats)} nats"})
    if not rows:
        return None
    costs = [float(str(row["nats"])) for row in rows]
    ticks = [10.0 ** power
             for power in range(math.ceil(math.log10(min(costs))), math.floor(math.log10(max(costs))) + 1)]
    kinds = list(dict.fromkeys(str(row["kind"]) for row in rows))
    chart = alt.Chart(inline(rows)).mark_rect().encode(
        x=alt.X("layer:O", title="layer", axis=alt.Axis(labelAngle=0, labelOverlap=True, ticks=False)),
        y=alt.Y("kind:N", sort=kinds, axis=names_axis()),
        color=alt.Color("nats:Q", title="nats (log)", scale=alt.Scale(type="log", scheme="cividis"),
                        legend=alt.Legend(format="~g", gradientLength=220,
                                          direction="horizontal", values=ticks)),
        tooltip=["layer:O", "kind:N", "KL:N"])
    return finished(chart, "What 4 bits cost in each Linear.", 24 * len(kinds))
