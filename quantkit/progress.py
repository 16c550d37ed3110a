"""What long work tells whoever waits for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """``done`` of ``total`` units are finished; ``label`` is being worked on."""

    done: int
    total: int
    label: str


Listener = Callable[[Event], None]


def silent(event: Event) -> None:
    """A listener that doesn't listen."""
