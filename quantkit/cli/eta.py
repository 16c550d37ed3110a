"""Estimates how long a count of units still takes, without saying what it can't know yet."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

MIN_SECONDS, MIN_UNITS = 5.0, 3
"""What an estimate rests on at least; of fewer units than six in all, half of them are enough."""
MAX_GROWTH = 1.5
"""How much longer than the one that was shown before an estimate may be: one slow unit isn't a slow rest."""
_MEMORY = 0.2
"""The share of all units over which the pace is averaged."""


class TimeLeft:
    """The seconds left of one phase; :meth:`begin` it anew for each.

    Args:
        clock: seconds that pass.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.begin(0)

    def begin(self, done: int) -> None:
        """Forget everything: ``done`` units are finished, and what comes is measured from now on."""
        self._start, self._first = self._last, self._done = self._clock(), done
        self._pace: float | None = None
        self._shown: float | None = None
        self._kept, self._total = False, done

    def update(self, done: int, total: int, kept: bool = False) -> None:
        """Take in a report.

        Args:
            done, total: units.
            kept: the unit that begins was finished by an earlier attempt; its time doesn't count.
        """
        if self._kept:
            self.begin(done)
        self._kept = kept
        now, moved = self._clock(), done - self._done
        if moved > 0:
            pace = (now - self._last) / moved
            # the mean of the first units, then of the latest ones
            share = max(moved / (done - self._first), 1 - math.exp(-moved / max(1.0, _MEMORY * total)))
            self._pace = pace if self._pace is None else self._pace + share * (pace - self._pace)
            self._last, self._done = now, done
        self._total = total

    def show(self) -> float | None:
        """The seconds left, for showing them; ``None`` if that can't be known yet, or nothing is left."""
        enough = min(MIN_UNITS, math.ceil((self._total - self._first) / 2))
        if self._pace is None or self._done >= self._total or self._done - self._first < enough or (
                self._last - self._start < MIN_SECONDS):
            return None
        seconds = self._pace * (self._total - self._done)
        if self._shown is not None:
            seconds = min(seconds, MAX_GROWTH * self._shown)
        self._shown = seconds
        return seconds


def human_seconds(seconds: float) -> str:
    """``8 s``, ``40 s``, ``4 min``, ``2 h 10 min``: as exact as an estimate is."""
    if seconds < 10:
        return f"{math.ceil(seconds)} s"
    if seconds < 90:
        return f"{5 * round(seconds / 5)} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, rest = divmod(10 * round(minutes / 10), 60)
    return f"{hours} h" + (f" {rest} min" if rest else "")
