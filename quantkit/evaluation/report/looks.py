"""How variants look in figures: a color a model, a shape a KV setting.

The colors are those of Okabe and Ito, which people with any kind of color blindness can tell apart
(https://jfly.uni-koeln.de/color/); its yellow and black are left out, for light and dark grounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.evaluation.report.base import short_names
from quantkit.evaluation.result import ModelResult

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-left",
          "triangle-right")
"""Vega's names."""
_NAME = 40


@dataclass(frozen=True)
class VariantLook:
    """One row of results in figures.

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


def shortened(text: str, limit: int = _NAME) -> str:
    """At most ``limit`` characters of a text; the ends of names differ more than their beginnings."""
    return text if len(text) <= limit else f"…{text[-limit + 1:]}"
