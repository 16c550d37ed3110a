"""Progress events of long work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ProgressEvent:
    """``done`` of ``total`` units are finished; ``label`` is being worked on."""

    done: int
    total: int
    label: str


Listener = Callable[[ProgressEvent], None]


def silent(event: ProgressEvent) -> None:
    """A listener that doesn't listen."""


compiling: list[Listener] = []
"""Who hears of kernels that are compiled; the command line is, a program that imports quantkit may be."""


def tell_compiling(done: int, total: int, label: str) -> None:
    """Tell them."""
    for listener in compiling:
        listener(ProgressEvent(done, total, label))
