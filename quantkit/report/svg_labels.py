"""Places labels in a plot beside their marks, without covering each other or another mark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from unicodedata import east_asian_width

LINE = 18
"""Height of a label, in the plot's units."""
FONT = 15


@dataclass(frozen=True)
class LabelBox:
    """A rectangle; ``y`` grows downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: LabelBox) -> float:
        """The area that both cover."""
        return (max(0.0, min(self.right, other.right) - max(self.left, other.left))
                * max(0.0, min(self.bottom, other.bottom) - max(self.top, other.top)))

    def holds(self, other: LabelBox) -> bool:
        """Whether ``other`` lies in this one."""
        return (self.left <= other.left and other.right <= self.right
                and self.top <= other.top and other.bottom <= self.bottom)


@dataclass(frozen=True)
class PlotLabel:
    """A text at its baseline's ``anchor`` point; ``moved`` if not right beside its mark."""

    text: str
    x: float
    y: float
    anchor: Literal["start", "end"]
    moved: bool


def reach(text: str) -> float:
    """An upper estimate of a text's width: whoever renders it chooses the font."""
    wide = sum(1.05 if east_asian_width(c) in "WF" else 0.95 if c in "mwMW@%…—" else
               0.78 if c.isupper() else 0.64 for c in text)
    return FONT * wide


def cut(text: str, letters: int) -> str:
    """A text cut at its beginning to the width of ``letters`` ordinary letters: ends differ more."""
    if reach(text) <= letters * 0.64 * FONT:
        return text
    while reach("…" + text) > letters * 0.64 * FONT:
        text = text[1:]
    return "…" + text


def place(marks: Sequence[tuple[float, float]], texts: Sequence[str], radius: float,
          inside: LabelBox) -> list[PlotLabel]:
    """Find a place for each label, from the top mark to the lowest.

    Args:
        marks: centers.
        texts: a label each, not wider than ``inside``.
        radius: of the marks.
        inside: no label leaves it.

    Returns:
        in the order of ``marks``: the nearest free place; where all is full, the least covered.
    """
    taken = [LabelBox(x - radius - 1, y - radius - 1, x + radius + 1, y + radius + 1) for x, y in marks]
    labels: dict[int, PlotLabel] = {}
    for i in sorted(range(len(marks)), key=lambda i: (marks[i][1], marks[i][0])):
        options = _options(*marks[i], texts[i], radius, inside)
        cost = [sum(box.meets(other) for other in taken) for box, _ in options]
        box, label = options[cost.index(min(cost))]
        taken.append(box)
        labels[i] = label
    return [labels[i] for i in range(len(marks))]


def _options(x: float, y: float, text: str, radius: float,
             inside: LabelBox) -> list[tuple[LabelBox, PlotLabel]]:
    """All places within the plot, the nearest first; there is always one."""
    width, side = reach(text), radius + 6
    labels = []
    # beside the mark, then further up and down; half lines first, as neighbors are often close
    for away in sorted((n * LINE / 2 for n in range(-40, 41)), key=lambda d: (abs(d), d)):
        middle = min(max(y + away, inside.top + LINE / 2), inside.bottom - LINE / 2)
        begins = ((x + side, "start"), (x - side - width, "end"),
                  (min(max(x - width / 2, inside.left), inside.right - width), "start"))
        for left, anchor in begins[:2 if abs(middle - y) < LINE else 3]:
            box = LabelBox(left, middle - LINE / 2, left + width, middle + LINE / 2)
            if inside.holds(box):
                at = left if anchor == "start" else left + width
                labels.append((box, PlotLabel(text, at, middle + 5, "start" if anchor == "start" else "end",
                                              abs(middle - y) >= LINE)))
    return labels
