"""The frontier: the variants that no other is both closer and faster, or both closer and smaller, than."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quantkit.evaluation.metrics import KL, Interval
from quantkit.evaluation.report.base import number
from quantkit.evaluation.result import EvalResult, ModelResult

QUALITY, SPEED = KL.name, "decode_tok_s"
_LOWEST = 1e-4
"""Nats; where the axis begins if no KL is above zero."""


@dataclass(frozen=True)
class QualityFloor:
    """Where a logarithmic axis of KL ends; the reference, whose KL is 0, and all below it stand there.

    Attributes:
        value: the KL in nats.
        noise: its interval, if it is the noise floor that was measured; ``None``: it is half the smallest KL.
    """

    value: float
    noise: Interval | None = None

    @property
    def name(self) -> str:
        """What its line is called."""
        return "KL 0" if self.noise is None else f"noise floor {number(self.value)}"

    @property
    def sentence(self) -> str:
        """What a text says about it."""
        if self.noise is None:
            return ("A logarithmic axis has no zero: a KL of 0, the reference's own, is "
                    "drawn at the dashed line.")
        return (f"The dashed line is the noise floor, {number(self.value)} nats: "
                "the reference's own arithmetic. What is not above it is drawn on it.")

    def at_least(self, value: float) -> float:
        """Where a value stands."""
        return max(value, self.value)


@dataclass(frozen=True)
class FrontierPoint:
    """A variant in one of the two pictures.

    Attributes:
        index: the index of its row.
        quality: KL, in nats.
        cost: tokens a second, or GB.
        dominated: whether another is at least as good in both and better in one.
    """

    index: int
    quality: Interval
    cost: Interval
    dominated: bool


@dataclass(frozen=True)
class Frontier:
    """KL against one other quantity.

    Attributes:
        key: ``speed`` or ``bytes``.
        title: the title of the quantity.
        higher: whether more of it is better.
        points: in the order of the rows; a row without one of the two values has none.
        floor: the end of the axis of KL.
    """

    key: str
    title: str
    higher: bool
    points: tuple[FrontierPoint, ...]
    floor: QualityFloor

    @property
    def span(self) -> tuple[float, float]:
        """Where the axis of the quantity begins and ends."""
        low = min(point.cost.low for point in self.points)
        high = max(point.cost.high for point in self.points)
        room = 0.1 * (high - low) or 0.2 * high or 1.0
        return max(0.0, low - room), high + room

    @property
    def line(self) -> list[FrontierPoint]:
        """The points that nothing dominates, by what the axis shows."""
        return sorted((point for point in self.points if not point.dominated),
                      key=lambda point: point.cost.value)


def frontiers(result: EvalResult) -> list[Frontier]:
    """KL against the speed of decoding and against the bytes of weights and KV cache, each where some row
    has both values. Intervals play no role in who dominates whom."""
    cached = any(row.kv_bytes for row in result.rows)
    pictures = []
    for key, title, higher, cost in (
            ("speed", "decode, tok/s", True, _speed),
            ("bytes", "weights and KV cache, GB" if cached else "weights, GB", False, _gigabytes)):
        pairs = [(index, row.metrics[QUALITY], value) for index, row in enumerate(result.rows)
                 if finite(row.metrics.get(QUALITY)) and finite(value := cost(row))]
        if pairs:
            pictures.append(Frontier(key, title, higher, _points(pairs, higher), quality_floor(result)))
    return pictures


def quality_floor(result: EvalResult) -> QualityFloor:
    """The noise floor, if it was measured, else half the smallest KL above zero."""
    noise = result.floors.get(QUALITY) or result.noise_floor
    if noise is not None and finite(noise) and noise.value > 0:
        return QualityFloor(noise.value, noise)
    values = [row.metrics[QUALITY].value for row in result.rows if finite(row.metrics.get(QUALITY))]
    return QualityFloor(min((value for value in values if value > 0), default=2 * _LOWEST) / 2)


def dominated_rows(result: EvalResult) -> frozenset[int]:
    """Rows that are in a picture, and on the frontier of none."""
    points = [point for frontier in frontiers(result) for point in frontier.points]
    best = {point.index for point in points if not point.dominated}
    return frozenset(point.index for point in points) - best


def finite(interval: Interval | None) -> bool:
    """Whether it is there and all of it can be drawn."""
    return interval is not None and all(map(math.isfinite, (interval.value, interval.low, interval.high)))


def _speed(row: ModelResult) -> Interval | None:
    return row.metrics.get(SPEED)


def _gigabytes(row: ModelResult) -> Interval | None:
    if not row.memory_bytes:
        return None
    size = row.memory_bytes / 1e9
    return Interval(size, size, size)


def _points(pairs: Sequence[tuple[int, Interval, Interval | None]],
            higher: bool) -> tuple[FrontierPoint, ...]:
    better: Callable[[float], float] = (lambda value: -value) if higher else (lambda value: value)
    values = [(quality.value, better(cost.value)) for _, quality, cost in pairs if cost is not None]
    return tuple(FrontierPoint(index, quality, cost, any(
        other[0] <= value[0] and other[1] <= value[1] and other != value for other in values))
        for (index, quality, cost), value in zip(pairs, values) if cost is not None)
