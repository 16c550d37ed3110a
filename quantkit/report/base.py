"""What a reporter is, and how numbers are written in all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quantkit.evaluate.metrics import Interval
from quantkit.evaluate.run import EvalResult, Row


@dataclass(frozen=True)
class Reporter:
    """A registered way to write results.

    Attributes:
        name: as registered.
        file: the file name it has in a report folder.
        render: result → the file's content.
    """

    name: str
    file: str
    render: Callable[[EvalResult], str]


def number(value: float | None, digits: int = 3) -> str:
    """``value`` with so many significant digits, never in scientific notation: ``0.00312``, ``28.7``."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    places = max(0, digits - 1 - _magnitude(value))
    return f"{value:.{places}f}"


def _magnitude(value: float) -> int:
    return int(f"{value:e}".split("e")[1])


def spread(interval: Interval | None, percent: bool = False) -> tuple[str, str]:
    """A value and its interval as two texts: ``("28.7", "27.5–30.0")``."""
    if interval is None:
        return "–", ""
    factor = 100 if percent else 1
    low, high, value = (factor * v for v in (interval.low, interval.high, interval.value))
    digits = 3 if value < 1000 else 4
    tail = "%" if percent else ""
    if low == high:
        return number(value, digits) + tail, ""
    return number(value, digits) + tail, f"{number(low, digits)}–{number(high, digits)}"


def megabytes(count: int | None) -> str:
    """``135 MB``, ``1.24 GB``, in powers of 1000."""
    if count is None:
        return "–"
    return f"{count / 1e9:.2f} GB" if count >= 999.5e6 else f"{number(count / 1e6)} MB"


def short_name(row: Row) -> str:
    """The last part of a model's path or name."""
    return Path(row.model).name or row.model
