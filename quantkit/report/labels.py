"""Places for labels beside marks, so that none covers a mark or another label."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

GAP = 5.0
"""Between a mark's middle and its label, beside the mark's radius."""
_STEPS = (0, 9, 18, 30, 44, 60)
_ANGLES = tuple(math.radians(degrees) for degrees in (0, 180, 90, 270, 35, 325, 145, 215, 60, 300, 120, 240))


@dataclass(frozen=True)
class LabelBox:
    """A rectangle, y upward."""

    left: float
    bottom: float
    right: float
    top: float

    def overlap(self, other: LabelBox) -> float:
        """The area that both cover."""
        return (max(0.0, min(self.right, other.right) - max(self.left, other.left))
                * max(0.0, min(self.top, other.top) - max(self.bottom, other.bottom)))

    def within(self, other: LabelBox) -> bool:
        """Whether no part of it is outside of the other."""
        return (self.left >= other.left and self.right <= other.right
                and self.bottom >= other.bottom and self.top <= other.top)


@dataclass(frozen=True)
class LabelRequest:
    """A label to be placed.

    Attributes:
        x, y: the middle of its mark.
        width, height: of the text.
        required: whether it must stand somewhere even where all is full.
    """

    x: float
    y: float
    width: float
    height: float
    required: bool


def place_labels(requests: Sequence[LabelRequest], radius: float, inside: LabelBox,
                 avoid: Sequence[tuple[float, float]] = ()) -> list[LabelBox | None]:
    """Where each label stands.

    Args:
        requests: labels; those that are required are placed first.
        radius: of the marks.
        inside: no label leaves it.
        avoid: further points that labels had better not cover, such as a line's.

    Returns:
        in the order of ``requests``; ``None`` where there is no free place and the label isn't required.
    """
    taken = [LabelBox(request.x - radius, request.y - radius, request.x + radius, request.y + radius)
             for request in requests]
    places: list[LabelBox | None] = [None] * len(requests)
    for index in sorted(range(len(requests)), key=lambda i: (not requests[i].required, -requests[i].y)):
        options = _options(requests[index], radius, inside)
        covered = [_covered(box, avoid) for box, _ in options]
        costs = [(sum(box.overlap(other) for other in taken), away + 6.0 * count)
                 for (box, away), count in zip(options, covered)]
        if not costs:
            continue
        free = [(cost[1], number) for number, cost in enumerate(costs)
                if cost[0] == 0 and (requests[index].required or not covered[number])]
        if free:
            places[index] = options[min(free)[1]][0]
        elif requests[index].required:
            places[index] = options[costs.index(min(costs))][0]
        if (box := places[index]) is not None:
            taken.append(box)
    return places


def _covered(box: LabelBox, points: Sequence[tuple[float, float]]) -> int:
    return sum(box.left <= x <= box.right and box.bottom <= y <= box.top for x, y in points)


def _options(request: LabelRequest, radius: float, inside: LabelBox) -> list[tuple[LabelBox, float]]:
    """Places in all directions, each with how far it is away."""
    options = []
    for step in _STEPS:
        for turn, angle in enumerate(_ANGLES):
            away = radius + GAP + step
            x, y = request.x + away * math.cos(angle), request.y + away * math.sin(angle)
            left = x - request.width * (1 - math.cos(angle)) / 2
            bottom = y - request.height * (1 - math.sin(angle)) / 2
            box = LabelBox(left, bottom, left + request.width, bottom + request.height)
            if box.within(inside):
                options.append((box, step + turn / 4))
    return options
