"""The roofline: operations a second against operations a byte, both logarithmic, below the machine's ceilings
(Williams, Waterman and Patterson 2009, https://doi.org/10.1145/1498765.1498785)."""

from __future__ import annotations

import math

import altair as alt

from quantkit.evaluation.report.base import SHAPES, number
from quantkit.evaluation.report.charts.base import Spec, by_name, finished, inline, log_axis, log_scale
from quantkit.evaluation.report.speed_grids import operator_name, reached, seconds
from quantkit.evaluation.roofline.result import Roofline


def roofline_spec(roofline: Roofline) -> Spec | None:
    """Ceilings as lines, operators as points, each with a line to what was predicted."""
    ceilings = roofline.ceilings
    rows = []
    for operator in roofline.operators:
        if (0 < operator.seconds.median < math.inf and 0 < operator.predicted_s < math.inf
                and operator.operations > 0 and operator.bytes > 0):
            rows.append({
                "operator": operator.operator, "name": operator_name(operator), "at": operator.intensity,
                "measured": operator.operations / operator.seconds.median,
                "predicted": operator.operations / operator.predicted_s,
                "time": f"{seconds(operator.seconds.median)}, predicted {seconds(operator.predicted_s)}",
                "of the roof": reached(operator), "bound by": operator.bound,
                "compute-bound from": f"{operator.bound_from} rows" if operator.bound_from else "–"})
    limits = {name: value for name, value in ceilings.operations_s.items() if 0 < value < math.inf}
    if not rows or not 0 < ceilings.read_bytes_s < math.inf:
        return None
    ends = [float(str(row["at"])) for row in rows]
    ends += [value / ceilings.read_bytes_s for value in limits.values()]
    low, high = min(ends) / 2, max(ends) * 3
    lowest = min(*(float(str(row["measured"])) for row in rows), low * ceilings.read_bytes_s) / 1.5
    highest = max([*limits.values(), *(float(str(row["measured"])) for row in rows)]) * 2.5
    x = alt.X("at:Q", title="operations a byte (log)", scale=log_scale(low, high), axis=log_axis(low, high))
    y = alt.Y("measured:Q", title="operations a second (log)", axis=log_axis(lowest, highest, "~s"),
              scale=log_scale(lowest, highest))
    roof, labels = _roof(roofline, limits, low, high)
    names = list(dict.fromkeys(str(row["operator"]) for row in rows))
    shape = alt.Shape("operator:N", title=None, scale=alt.Scale(
        domain=names, range=[SHAPES[index % len(SHAPES)] for index in range(len(names))]))
    base = alt.Chart(inline(rows)).encode(x=x, color=by_name("operator", names))
    layers = [
        alt.Chart(inline(roof)).mark_line(strokeWidth=1.6, opacity=0.8).encode(
            x=x, y=y, detail="ceiling:N", strokeDash=alt.StrokeDash("ceiling:N", legend=None)),
        alt.Chart(inline(labels)).mark_text(align="right", dy=-7, fontSize=11, limit=260).encode(
            x=x, y=y, text="text:N"),
        base.mark_rule(opacity=0.5).encode(y=y, y2="predicted:Q"),
        base.mark_point(filled=True, size=70, opacity=1).encode(
            y=y, shape=shape, tooltip=["name:N", "time:N", "of the roof:N",
                                        "bound by:N", "compute-bound from:N"])]
    return finished(alt.layer(*layers),
                    f"Roofline of {roofline.label}: operators below the machine's ceilings.", 360)


def _roof(roofline: Roofline, limits: dict[str, float], low: float,
          high: float) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """The line of the bandwidth up to the highest ceiling, a line a ceiling, and their names."""
    bandwidth = roofline.ceilings.read_bytes_s
    top = max(limits.values(), default=bandwidth * high)
    lines: list[dict[str, object]] = [
        {"ceiling": "memory", "at": low, "measured": low * bandwidth},
        {"ceiling": "memory", "at": top / bandwidth, "measured": top}]
    labels: list[dict[str, object]] = []
    for name, value in limits.items():
        lines += [{"ceiling": name, "at": value / bandwidth, "measured": value},
                  {"ceiling": name, "at": high, "measured": value}]
        labels.append({"at": high, "measured": value,
                       "text": f"{name}: {number(value / 1e12)} T operations/s"})
    middle = (low * min(limits.values(), default=top) / bandwidth) ** 0.5
    labels.append({"at": middle, "measured": middle * bandwidth,
                   "text": f"read: {number(bandwidth / 1e9)} GB/s"})
    return lines, labels
