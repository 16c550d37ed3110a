"""Places for labels beside marks, so that none covers a mark or another label."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

GAP = 5.0
"""Between a mark's edge and its label."""
_STEPS = (0, 9, 18, 30, 44, 60)
_NEAR = 22
"""How far from its mark a label stands that needn't stand anywhere: of one that is farther nobody sees whose
it is."""
_ANGLES = tuple(math.radians(degrees) for degrees in (0, 180, 90, 270, 35, 325, 145, 215, 60, 300, 120, 240))
_LINE_COST = 6.0
"""What a point of a line that a label covers costs, beside pixels that it is away from its mark."""
Boxes = NDArray[np.float64]
"""Rows of left, bottom, right, top."""


@dataclass(frozen=True)
class LabelBox:
    """A rectangle, y upward."""

    left: float
    bottom: float
    right: float
    top: float


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
    taken: Boxes = np.array([[request.x - radius, request.y - radius, request.x + radius, request.y + radius]
                             for request in requests]).reshape(-1, 4)
    points = np.array(avoid, dtype=np.float64).reshape(-1, 2)
    places: list[LabelBox | None] = [None] * len(requests)
    for index in sorted(range(len(requests)), key=lambda i: (not requests[i].required, -requests[i].y)):
        request = requests[index]
        boxes, away = _options(request, radius, inside)
        if not len(boxes):
            continue
        overlaps, covered = _overlaps(boxes, taken), _covered(boxes, points)
        free = overlaps == 0 if request.required else (
            (overlaps == 0) & (covered == 0) & (away <= _NEAR))
        if free.any():
            choice = int(np.argmin(np.where(free, away + _LINE_COST * covered, np.inf)))
        elif request.required:
            choice = int(np.argmin(overlaps))
        else:
            continue
        places[index] = LabelBox(*map(float, boxes[choice]))
        taken = np.vstack([taken, boxes[choice]])
    return places


def _overlaps(boxes: Boxes, taken: Boxes) -> NDArray[Any]:
    """The area of each box that others cover."""
    width = np.minimum(boxes[:, None, 2], taken[:, 2]) - np.maximum(boxes[:, None, 0], taken[:, 0])
    height = np.minimum(boxes[:, None, 3], taken[:, 3]) - np.maximum(boxes[:, None, 1], taken[:, 1])
    return np.asarray((np.maximum(width, 0) * np.maximum(height, 0)).sum(axis=1))


def _covered(boxes: Boxes, points: NDArray[np.float64]) -> NDArray[Any]:
    """How many points each box covers."""
    x, y = points[:, 0], points[:, 1]
    return np.asarray(((boxes[:, :1] <= x) & (x <= boxes[:, 2:3]) & (boxes[:, 1:2] <= y)
                       & (y <= boxes[:, 3:])).sum(axis=1))


def _options(request: LabelRequest, radius: float, inside: LabelBox) -> tuple[Boxes, NDArray[np.float64]]:
    """Places in all directions within the bounds, and how far each is away."""
    boxes, distances = [], []
    for step in _STEPS:
        for turn, angle in enumerate(_ANGLES):
            away = radius + GAP + step
            x, y = request.x + away * math.cos(angle), request.y + away * math.sin(angle)
            left = x - request.width * (1 - math.cos(angle)) / 2
            bottom = y - request.height * (1 - math.sin(angle)) / 2
            right, top = left + request.width, bottom + request.height
            if (inside.left <= left and right <= inside.right
                    and inside.bottom <= bottom and top <= inside.top):
                boxes.append((left, bottom, right, top))
                distances.append(step + turn / 4)
    return np.array(boxes, dtype=np.float64).reshape(-1, 4), np.array(distances)
