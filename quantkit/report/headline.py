"""What a comparison comes to, in sentences: what each variant costs and what it gains."""

from __future__ import annotations

from quantkit.evaluate.keys import PER_ITEM, PER_RUN
from quantkit.evaluate.metric_table import MetricInfo
from quantkit.evaluate.result import EvalResult, ModelResult
from quantkit.report.base import head, megabytes, number, short_names, shown

_NAME = 64
LIMIT = 4
"""More variants than this are too many to read: then only the best stand in the headline."""


def headline(result: EvalResult) -> list[str]:
    """A sentence a variant: its size and speed beside the first row's, and what it costs by the first metric
    of quality. Of more than :data:`LIMIT` variants, the smallest, the fastest and the closest."""
    if not result.rows:
        return []
    first, *others = result.rows
    names = {id(row): name if len(name) <= _NAME else f"…{name[-_NAME + 1:]}"
             for row, name in zip(result.rows, short_names(result.rows))}
    quality, speed = _first(result, False), _first(result, True)
    if not others:
        return [f"{names[id(first)]}: {_alone(first, quality, speed)}."]
    if len(others) > LIMIT:
        others = _best(others, quality, speed)
    return [f"{names[id(row)]}: {_against(row, first, quality, speed)}." for row in others]


def _first(result: EvalResult, timed: bool) -> tuple[str, MetricInfo] | None:
    """The first metric of quality, or of speed, that was measured."""
    return next(((key, info) for key, info in result.measured.items()
                 if info.per != PER_ITEM and (info.per == PER_RUN) == timed), None)


def _alone(row: ModelResult, *metrics: tuple[str, MetricInfo] | None) -> str:
    parts = [megabytes(row.file_bytes)]
    for key, info in filter(None, metrics):
        if (interval := row.metrics.get(key)) is not None and interval.value != 0:
            title, unit = head(info)
            parts.append(f"{title} {shown(interval, info)[0]} {unit}".rstrip())
    return ", ".join(parts)


def _against(row: ModelResult, first: ModelResult, quality: tuple[str, MetricInfo] | None,
             speed: tuple[str, MetricInfo] | None) -> str:
    parts = []
    other_kv = row.kv_bytes and first.kv_bytes and row.kv != first.kv
    if row.file_bytes and first.file_bytes and (row.file_bytes != first.file_bytes or not other_kv):
        parts.append(_size(first.file_bytes / row.file_bytes))
    if row.kv_bytes and first.kv_bytes and row.kv != first.kv:
        parts.append(f"KV cache {_size(first.kv_bytes / row.kv_bytes)}")
    if speed is not None:
        ours, theirs = row.metrics.get(speed[0]), first.metrics.get(speed[0])
        if ours is not None and theirs is not None and theirs.value > 0:
            parts.append(f"{number(ours.value / theirs.value, 2)} times as fast")
    if quality is not None and (interval := row.metrics.get(quality[0])) is not None:
        value, span = shown(interval, quality[1])
        parts.append(f"{quality[1].title} {value}" + (f" ({span})" if span else ""))
    return ", ".join(parts) or "nothing to compare"


def _size(ratio: float) -> str:
    if abs(ratio - 1) < 0.05:
        return "as large"
    return f"{number(ratio, 2)} times smaller" if ratio > 1 else f"{number(1 / ratio, 2)} times larger"


def _best(rows: list[ModelResult], quality: tuple[str, MetricInfo] | None,
          speed: tuple[str, MetricInfo] | None) -> list[ModelResult]:
    """The smallest, the fastest and the closest to the reference, in the order of the rows."""
    sizes = [(row.file_bytes + (row.kv_bytes or 0), index) for index, row in enumerate(rows)
             if row.file_bytes is not None]
    best = [rows[min(sizes)[1]]] if sizes else []
    for metric in filter(None, (speed, quality)):
        key, info = metric
        sign = -1 if info.direction == "higher" else 1
        measured = [(sign * row.metrics[key].value, index) for index, row in enumerate(rows)
                    if key in row.metrics]
        best += [rows[min(measured)[1]]] if measured else []
    return [row for row in rows if any(row is other for other in best)]
