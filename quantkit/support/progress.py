"""Progress events of long work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class WorkPhase:
    """A part of a run that counts units of its own.

    Attributes:
        name: the work that is done in it, ``quantizing layers``.
        number: from 1 on.
        total: the phases of the run, with those that an earlier attempt has finished.
    """

    name: str
    number: int
    total: int


@dataclass(frozen=True)
class ProgressEvent:
    """``done`` of ``total`` units are finished; ``label`` is being worked on.

    Attributes:
        phase: the phase whose units these are; ``None`` if the work isn't divided into phases.
        kept: an earlier attempt finished the unit ``label``: the time that it takes now says nothing about
            the others.
        unit: the unit of counts where it isn't plain: ``MiB``; ``%`` if only the share means something.
        share: the share of the unit ``label`` that is done, from 0 to 1, where that is known.
        detail: what is being done within the unit, if there is more to say than ``label``.
    """

    done: int
    total: int
    label: str
    phase: WorkPhase | None = None
    kept: bool = False
    unit: str = ""
    share: float = 0.0
    detail: str = ""


Listener = Callable[[ProgressEvent], None]


def silent(event: ProgressEvent) -> None:
    """A listener that doesn't listen."""


class Phases:
    """Says of events which phase they belong to.

    Args:
        listener: hears of the events.
        names: the names of all phases, in the order in which they come.
    """

    def __init__(self, listener: Listener, names: Sequence[str]) -> None:
        self._listener, self._names = listener, tuple(names)

    def __call__(self, name: str) -> Listener:
        """A listener for the events of the phase ``name``. Raises ValueError if there is no such phase."""
        phase = WorkPhase(name, self._names.index(name) + 1, len(self._names))
        return lambda event: self._listener(replace(event, phase=phase))


def between(listener: Listener, before: int, total: int) -> Listener:
    """A listener for a part of a longer run of ``total`` phases, ``before`` of which come earlier."""
    def shifted(event: ProgressEvent) -> None:
        phase = event.phase
        if phase is not None:
            event = replace(event, phase=WorkPhase(phase.name, before + phase.number, total))
        listener(event)

    return shifted


compiling: list[Listener] = []
"""Who hears of kernels that are compiled; the command line is, a program that imports quantkit may be."""


def tell_compiling(done: int, total: int, label: str) -> None:
    for listener in compiling:
        listener(ProgressEvent(done, total, label))
