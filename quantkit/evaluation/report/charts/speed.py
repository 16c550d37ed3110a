"""Charts of speed and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import altair as alt

from quantkit.evaluation.report.base import VariantLook, megabytes, number
from quantkit.evaluation.report.charts.base import (
    Spec,
    by_model,
    by_name,
    by_setting,
    dash_by_setting,
    finished,
    identity,
    inline,
    timed,
    variant_axis,
)
from quantkit.evaluation.result import EvalResult
from quantkit.evaluation.speed.results import Spread

_TWO_LINES = 32
"""Pixels of a name with its KV setting below, on a narrow page."""
_PARTS = {"weights": "#0072B2", "workspace": "#E69F00", "KV cache": "#009E73"}


@dataclass(frozen=True)
class _TimedPlace:
    """A speed of a variant at a place of an axis; ``None``: it wasn't measured."""

    look: VariantLook
    at: int
    spread: Spread | None


def by_batch(result: EvalResult, looks: Sequence[VariantLook]) -> Spec | None:
    """Decoding, tokens a second of all sequences together, at the shortest context."""
    cells = [(look, cell) for look, sweep in timed(result, looks) for cell in sweep.decode]
    shortest = min((cell.context for _, cell in cells), default=0)
    places = [_TimedPlace(look, cell.batch, cell.tok_s) for look, cell in cells if cell.context == shortest]
    return _lines(looks, places, "batch", "decode, tok/s of all together", 2)


def by_context(result: EvalResult, looks: Sequence[VariantLook]) -> Spec | None:
    """Decoding by context, at the smallest batch."""
    cells = [(look, cell) for look, sweep in timed(result, looks) for cell in sweep.decode]
    smallest = min((cell.batch for _, cell in cells), default=0)
    places = [_TimedPlace(look, cell.context, cell.tok_s) for look, cell in cells if cell.batch == smallest]
    return _lines(looks, places, "tokens of context", "decode, tok/s", 2)


def prefill(result: EvalResult, looks: Sequence[VariantLook]) -> Spec | None:
    """Prompt tokens a second by prompt."""
    return _lines(looks, [_TimedPlace(look, cell.tokens, cell.tok_s) for look, sweep in timed(result, looks)
                          for cell in sweep.prefill], "tokens of the prompt", "prefill, tok/s", 1)


def first_token(result: EvalResult, looks: Sequence[VariantLook]) -> Spec | None:
    """Seconds to the first token by prompt."""
    return _lines(looks, [_TimedPlace(look, cell.tokens, cell.first_token_s)
                          for look, sweep in timed(result, looks) for cell in sweep.prefill],
                  "tokens of the prompt", "time to first token, s", 1)


def _ranged(spread: Spread) -> str:
    return f"{number(spread.median)} ({number(spread.low)}–{number(spread.high)})"


def _lines(looks: Sequence[VariantLook], places: Sequence[_TimedPlace], x: str, y: str,
           least: int) -> Spec | None:
    """Lines over a logarithmic axis of powers of two, if it has at least ``least`` places. With a place at 0
    the axis is linear up to the next one."""
    measured = [(place, place.spread) for place in places if place.spread is not None]
    values = sorted({place.at for place, _ in measured})
    if len(values) < least:
        return None
    if len(values) == 1:
        return _bars(looks, [(place.look, spread) for place, spread in measured], f"{y}, {values[0]:,} {x}")
    rows = [{**identity(place.look), "at": place.at, "value": spread.median, x: f"{place.at:,}",
             y: _ranged(spread)} for place, spread in measured]
    scale = alt.Scale(type="log", base=2, nice=False, padding=14) if values[0] else alt.Scale(
        type="symlog", constant=values[1] / 2 if len(values) > 1 else 1, nice=False, padding=14)
    base = alt.Chart(inline(rows)).encode(
        x=alt.X("at:Q", title=x, scale=scale,
                axis=alt.Axis(values=values, format=",d", labelOverlap=True)),
        y=alt.Y("value:Q", title=y, scale=alt.Scale(zero=True)), color=by_model(looks))
    chart = alt.layer(base.mark_line(strokeWidth=1.6, opacity=0.8).encode(
        strokeDash=dash_by_setting(looks), detail="variant:N"),
        base.mark_point(filled=True, size=60, opacity=1).encode(
            shape=by_setting(looks), tooltip=["variant:N", f"{x}:N", f"{y}:N"]))
    return finished(chart, f"{y} by {x}.")


def _bars(looks: Sequence[VariantLook], cells: Sequence[tuple[VariantLook, Spread]], title: str) -> Spec:
    """A bar a variant, with the range of its runs."""
    rows = [{**identity(look), "value": spread.median, "low": spread.low, "high": spread.high,
             "measured": _ranged(spread)} for look, spread in cells]
    base = alt.Chart(inline(rows)).encode(y=variant_axis(looks))
    highest = max(spread.high for _, spread in cells)
    x = alt.X("value:Q", title=title, scale=alt.Scale(domain=[0, highest * 1.15], nice=False))
    chart = alt.layer(
        base.mark_bar(opacity=0.85, size=16).encode(x=x, color=by_model(looks),
                                                    tooltip=["variant:N", "measured:N"]),
        base.mark_rule(strokeWidth=1.5).encode(x="low:Q", x2="high:Q"))
    return finished(chart, f"{title}.", _TWO_LINES * len(rows))


def gaps(result: EvalResult, looks: Sequence[VariantLook]) -> Spec | None:
    """Milliseconds between two tokens: the median, and a line to the 99th percentile."""
    rows = [{**identity(look), "median": sweep.gap_ms["median"],
             "p99": sweep.gap_ms.get("p99", sweep.gap_ms["median"]),
             "gap": ", ".join(f"{key} {number(value)} ms" for key, value in sweep.gap_ms.items())}
            for look, sweep in timed(result, looks) if "median" in sweep.gap_ms]
    if not rows:
        return None
    base = alt.Chart(inline(rows)).encode(y=variant_axis(looks), color=by_model(looks))
    chart = alt.layer(base.mark_rule(strokeWidth=2).encode(
        x=alt.X("median:Q", title="ms", scale=alt.Scale(zero=True)), x2="p99:Q"),
        base.mark_point(filled=True, size=70, opacity=1).encode(
            x="median:Q", shape=by_setting(looks), tooltip=["variant:N", "gap:N"]))
    return finished(chart, "Milliseconds between two tokens of an answer.", _TWO_LINES * len(rows))


def memory(result: EvalResult, looks: Sequence[VariantLook]) -> Spec | None:
    """Weights, workspace and cache of one sequence stacked, a bar a context."""
    rows, totals = [], []
    used = [(look, sweep.memory) for look, sweep in timed(result, looks) if sweep.memory is not None]
    for look, use in used:
        for context, cache in use.kv_by_context:
            parts = {"weights": use.weights, "workspace": use.workspace or 0, "KV cache": cache}
            for order, (part, size) in enumerate(parts.items()):
                rows.append({**identity(look), "context": context, "part": part, "order": order,
                             "GB": size / 1e9, "bytes": megabytes(size), "tokens": f"{context:,}"})
            total = sum(parts.values())
            totals.append({**identity(look), "context": context, "GB": total / 1e9,
                           "text": f"{megabytes(total)} at {context:,}"})
    if not rows:
        return None
    contexts = sorted({int(str(total["context"])) for total in totals})
    y, offset = variant_axis(looks, 0.2), alt.YOffset("context:O", sort=contexts)
    highest = max(float(str(total["GB"])) for total in totals)
    x = alt.X("sum(GB):Q", title="GB", scale=alt.Scale(domain=[0, highest * 1.7], nice=False))
    bars = alt.Chart(inline(rows)).mark_bar().encode(
        x=x, y=y, yOffset=offset, order="order:Q", tooltip=["variant:N", "tokens:N", "part:N", "bytes:N"],
        color=by_name("part", list(_PARTS), list(_PARTS.values())))
    texts = alt.Chart(inline(totals)).mark_text(align="left", dx=4, fontSize=9.5).encode(
        x="GB:Q", y=y, yOffset=offset, text="text:N")
    return finished(alt.layer(bars, texts), "Bytes of weights, workspace and KV cache by context.",
                    len({row["variant"] for row in rows}) * max(_TWO_LINES, 12 * len(contexts) + 10))
