"""The interface of reporters, how they all write numbers, and how variants look in figures."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quantkit.evaluation.keys import PER_ITEM, TAILS
from quantkit.evaluation.metric_table import MetricInfo
from quantkit.evaluation.metrics import Interval
from quantkit.evaluation.result import EvalResult, ModelResult, short_names
from quantkit.evaluation.speed.machine_load import MachineLoad, busy_reason

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
"""Those of Okabe and Ito, which people with any kind of color blindness can tell apart
(https://jfly.uni-koeln.de/color/); its yellow and black are left out, for light and dark grounds."""
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-left",
          "triangle-right")
"""Vega's names."""
_LOOK_NAME = 40
_NAMED = 4
"""Variants that are named in a sentence; of more their number."""


@dataclass(frozen=True)
class Reporter:
    """A registered way to write results.

    Attributes:
        name: its name in the registry.
        file: the file name it has in a report folder, without a folder of its own.
        render: result → the file's content; text is written as UTF-8. It must not change the result, nor
            write anything itself. Rows may lack any metric, and values may be infinite.
        in_folder: whether ``--out`` writes it when ``--report`` names none.
    """

    name: str
    file: str
    render: Callable[[EvalResult], str | bytes]
    in_folder: bool = True


def number(value: float | None, digits: int = 3) -> str:
    """``value`` with ``digits`` significant digits: ``0.00312``, ``28.7``; ``8.10e-5`` for small ones."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    # of the rounded value: 9.999 has the places of 10.0
    mantissa, power = f"{value:.{digits - 1}e}".split("e")
    if not -4 <= int(power) < 6:
        return f"{mantissa}e{int(power)}"
    return f"{value:.{max(0, digits - 1 - int(power))}f}"


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
    between = " to " if low < 0 else "–"
    return number(value, digits) + tail, f"{number(low, digits)}{between}{number(high, digits)}"


def megabytes(count: int | None) -> str:
    """``135 MB``, ``1.24 GB``, in powers of 1000."""
    if count is None:
        return "–"
    return f"{number(count / 1e9)} GB" if count >= 999.5e6 else f"{number(count / 1e6)} MB"


def kilobytes(count: int | None) -> str:
    """``23.0 kB``, from a million on as :func:`megabytes`."""
    return f"{number(count / 1e3)} kB" if count is not None and count < 999.5e3 else megabytes(count)


def shown(value: Interval | None, info: MetricInfo) -> tuple[str, str]:
    """A metric's value and its interval as texts, shares in percent."""
    return spread(value, percent=info.unit == "%")


def head(info: MetricInfo) -> tuple[str, str]:
    """A column's title, and the unit that doesn't stand in its cells (``""``: none)."""
    return info.title, "" if info.unit == "%" else info.unit


def columns_of(result: EvalResult) -> dict[str, MetricInfo]:
    """The metrics that have a column: some row has a value, and no section of their own shows them."""
    return {key: info for key, info in result.measured.items()
            if info.in_tables and info.per != PER_ITEM and key not in TAILS}


def tasks_of(result: EvalResult) -> dict[str, MetricInfo]:
    """Scores of tasks, in the order in which they came."""
    return {key: info for key, info in result.measured.items() if info.per == PER_ITEM and key not in TAILS}


def text_name(name: str) -> str:
    """A text as reports call it: that of CPython's documentation by what it is, not by its module."""
    match = re.fullmatch(r"pydoc-(topics|reference|code)?-?([\d.]+)", name)
    return f"Python docs {match[2]}" if match else name


def withheld(result: EvalResult) -> list[str]:
    """A sentence that says which variants' speeds aren't shown, and why; none if all are."""
    busy = {name: row.speed for name, row in zip(short_names(result.rows), result.rows)
            if row.speed is not None and row.speed.withheld is not None}
    if not busy:
        return []
    loads = [sweep.load for sweep in busy.values() if sweep.load is not None]
    reason = next(str(sweep.withheld) for sweep in busy.values())
    if loads:
        reason = busy_reason(MachineLoad(stolen=max(load.stolen for load in loads),
                                         others=max(load.others for load in loads))) or reason
    names = ", ".join(busy) if len(busy) <= _NAMED else f"{len(busy)} of {len(result.rows)} variants"
    whose = "No speed is shown" if len(busy) == len(result.rows) else f"No speed of {names}"
    return [f"{whose}: {reason}. Run it again when the machine is idle."]


@dataclass(frozen=True)
class TextGrid:
    """A table.

    Attributes:
        title: the title above it.
        heads: the heads of all columns; the first has the rows' names. What follows a line break is small: a
            unit.
        rows: their cells. What follows a line break is small: an interval.
        notes: sentences below it.
        dimmed: indices of rows that recede, because others are better in everything.
    """

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    dimmed: frozenset[int] = field(default_factory=frozenset)

    @property
    def filled(self) -> TextGrid:
        """Without columns that have no value, the first aside."""
        kept = [index for index in range(len(self.heads))
                if not index or any(row[index] not in ("", "–") for row in self.rows)]
        return TextGrid(self.title, tuple(self.heads[index] for index in kept),
                        tuple(tuple(row[index] for index in kept) for row in self.rows),
                        self.notes, self.dimmed)


def pair(value: str, below: str = "") -> str:
    """A cell: a value, and what stands small below it."""
    return f"{value}\n{below}" if below else value


@dataclass(frozen=True)
class VariantLook:
    """One row of results in figures: a color a model, a shape a KV setting.

    Attributes:
        name: the variant's name, its KV setting included.
        model: the name without that.
        setting: the KV setting; ``""``: none was given.
        color: its color as ``#rrggbb``.
        shape: Vega's name of the shape.
    """

    name: str
    model: str
    setting: str
    color: str
    shape: str


def variant_looks(rows: Sequence[ModelResult]) -> list[VariantLook]:
    """A look a row, in their order. After seven models colors repeat, after eight settings shapes."""
    names = short_names(rows)
    of_rows = [name if row.kv is None else name.removesuffix(f" kv {row.kv}")
               for row, name in zip(rows, names)]
    models, settings = list(dict.fromkeys(of_rows)), list(dict.fromkeys(row.kv for row in rows))
    looks = []
    for row, name, model in zip(rows, names, of_rows):
        looks.append(VariantLook(shortened(name), shortened(model), shortened(row.kv or ""),
                                 COLORS[models.index(model) % len(COLORS)],
                                 SHAPES[settings.index(row.kv) % len(SHAPES)]))
    return looks


def shortened(text: str, limit: int = _LOOK_NAME) -> str:
    """At most ``limit`` characters of a text; the ends of names differ more than their beginnings."""
    return text if len(text) <= limit else f"…{text[-limit + 1:]}"
