"""The frontier as a chart."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from quantkit.evaluation.metric_table import MetricInfo
from quantkit.evaluation.report.base import VariantLook, head, megabytes, number, shown
from quantkit.evaluation.report.charts.base import (
    Spec,
    by_model,
    by_setting,
    finished,
    identity,
    inline,
    log_axis,
    log_scale,
)
from quantkit.evaluation.report.frontier import Frontier, FrontierPoint, finite
from quantkit.evaluation.report.quality_grids import info_of
from quantkit.evaluation.result import EvalResult

_TOLD = ("kl_mean", "flips", "perplexity", "decode_tok_s")


def frontier_spec(result: EvalResult, frontier: Frontier, looks: Sequence[VariantLook]) -> Spec:
    """KL on a logarithmic axis; names are placed beside the marks by the page, which knows its width."""
    floor = frontier.floor
    rows = [_row(result, frontier, point, looks[point.index]) for point in frontier.points]
    heights = [floor.at_least(point.quality.value) for point in frontier.points]
    highest = max(*heights, *(point.quality.high for point in frontier.points), floor.value * 10)
    low, high = floor.value * 0.5, highest * 1.6
    y = alt.Y("kl:Q", title="KL, nats (log)", axis=log_axis(low, high), scale=log_scale(low, high))
    x = alt.X("cost:Q", title=frontier.title, scale=alt.Scale(domain=list(frontier.span), nice=False))
    tips = [alt.Tooltip(f"{name}:N") for name in rows[0] if name not in _HIDDEN]
    layers: list[alt.Chart] = []
    if floor.noise is not None and floor.noise.low > 0:
        band = inline([{"kl": floor.noise.low, "high": floor.noise.high}])
        layers.append(alt.Chart(band).mark_rect(color="#56B4E9", opacity=0.25).encode(y=y, y2="high:Q"))
    end = inline([{"kl": floor.value, "text": floor.name}])
    layers += [alt.Chart(end, name="floor_rule").mark_rule(strokeDash=[4, 3], opacity=0.7).encode(y=y),
               alt.Chart(end, name="floor").mark_text(align="left", dy=10, dx=4, fontSize=11,
                                                       limit=320, opacity=0.8).encode(
                   y=y, x=alt.value(0), text="text:N")]
    line = [{"cost": point.cost.value, "kl": floor.at_least(point.quality.value)} for point in frontier.line]
    layers.append(alt.Chart(inline(line), name="stair").mark_line(
        interpolate="step-before" if frontier.higher else "step-after", strokeWidth=1.5, opacity=0.7).encode(
        x=x, y=y, order="cost:Q"))
    data = inline(rows)
    layers += [alt.Chart(data, name="ranges").mark_rule(opacity=0.6).encode(
                   x=x, y=alt.Y("low:Q"), y2="high:Q", color=by_model(looks)),
               alt.Chart(data, name="spans").mark_rule(opacity=0.6).encode(
                   x=alt.X("from:Q"), x2="to:Q", y=y, color=by_model(looks))]
    for name, dominated in (("dominated", True), ("best", False)):
        part = [row for row in rows if row["dominated"] == dominated]
        if part:
            layers.append(alt.Chart(inline(part), name=name).mark_point(
                filled=not dominated, size=90, opacity=0.75 if dominated else 1, strokeWidth=1.5).encode(
                x=x, y=y, color=by_model(looks), shape=by_setting(looks), tooltip=tips))
    best = ", ".join(looks[point.index].name for point in frontier.line)
    return finished(alt.layer(*layers), f"KL against {frontier.title}. On the frontier: {best}.", 380)


def metric_spec(result: EvalResult, key: str, info: MetricInfo, looks: Sequence[VariantLook]) -> Spec:
    """A metric against bytes of weights and KV cache."""
    factor = 100 if info.unit == "%" else 1
    cached = any(row.kv_bytes for row in result.rows)
    rows: list[dict[str, object]] = []
    for row, look in zip(result.rows, looks):
        value = row.metrics.get(key)
        if value is not None and finite(value) and row.memory_bytes:
            rows.append({**identity(look), "cost": row.memory_bytes / 1e9, "value": factor * value.value,
                         "low": factor * value.low, "high": factor * value.high})
    x = alt.X("cost:Q", title="weights and KV cache, GB" if cached else "weights, GB",
              scale=_around([float(str(row["cost"])) for row in rows]))
    y = alt.Y("value:Q", title=", ".join(filter(None, head(info))),
              scale=_around([float(str(row[key])) for row in rows for key in ("low", "value", "high")]))
    return finished(alt.layer(
        alt.Chart(inline(rows), name="ranges").mark_rule(opacity=0.6).encode(
            x=x, y=alt.Y("low:Q"), y2="high:Q", color=by_model(looks)),
        alt.Chart(inline(rows), name="best").mark_point(filled=True, size=90, opacity=1).encode(
            x=x, y=y, color=by_model(looks), shape=by_setting(looks))), f"{info.title} against bytes.")


def _around(values: Sequence[float]) -> alt.Scale:
    """A scale with room on both sides."""
    room = 0.15 * (max(values) - min(values)) or 0.5 * abs(values[0]) or 1.0
    return alt.Scale(domain=[min(values) - room, max(values) + room], nice=False, zero=False)


_HIDDEN = ("model", "setting", "cost", "kl", "low", "high", "from", "to", "dominated")


def _row(result: EvalResult, frontier: Frontier, point: FrontierPoint,
         look: VariantLook) -> dict[str, object]:
    row, floor = result.rows[point.index], frontier.floor
    above = point.quality.value >= floor.value
    told: dict[str, object] = {}
    for key in _TOLD:
        if any(key in other.metrics for other in result.rows):
            value, span = shown(row.metrics.get(key), info_of(result, key))
            told[info_of(result, key).title] = f"{value} ({span})" if span else value
    told["bits a weight"] = number(row.bits_per_weight)
    told["bytes"] = megabytes(row.memory_bytes)
    return {**identity(look), "method": row.method, **told, "cost": point.cost.value,
            "kl": floor.at_least(point.quality.value),
            "low": floor.at_least(point.quality.low) if above else floor.value,
            "high": point.quality.high if above else floor.value,
            "from": point.cost.low, "to": point.cost.high,
            "dominated": point.dominated}
