"""How busy the machine was with other work while something was timed, and when a speed isn't worth showing.

Linux counts for each processor the time that it worked, and the time that its host gave to other machines
(``/proc/stat``). What it worked beyond this process's own CPU time was others' work. Elsewhere nothing is
known, and only the spread of the runs tells.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from quantkit.support.frozen import Frozen

STAT, LOADAVG = Path("/proc/stat"), Path("/proc/loadavg")
MAX_STOLEN, MAX_OTHERS = 0.05, 0.15
"""Shares of the machine's time, while something is timed, that its host and other programs may take: more
changes a speed by more than a user would call the same."""
MAX_SPREAD = 0.3
"""Range of the timed runs over their median, from which on they are timed again."""
ROUNDS = 3
"""Times that something is timed at most, until the machine is quiet."""
Timed = TypeVar("Timed")


class MachineLoad(Frozen):
    """What the machine did beside what was timed.

    Attributes:
        stolen: share of its processors' time that its host gave to others.
        others: share of it that other programs worked, beyond the processors that the timed threads leave
            free.
    """

    stolen: float
    others: float

    @property
    def worst(self) -> float:
        """How far above what is allowed, as a factor."""
        return max(self.stolen / MAX_STOLEN, self.others / MAX_OTHERS)


@dataclass(frozen=True)
class LoadSample:
    """Counters at one time, in seconds: of all processors that this process may use, and of the process."""

    at: float
    worked: float
    stolen: float
    own: float

    @classmethod
    def now(cls) -> LoadSample | None:
        """The counters now; ``None`` where there are none."""
        try:
            lines = STAT.read_text(encoding="ascii", errors="replace").splitlines()
            allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
            ticks = os.sysconf("SC_CLK_TCK")
            rows = [[int(count) for count in line.split()[1:9]] for line in lines
                    if line.partition(" ")[0] in allowed]
        except (OSError, AttributeError, ValueError):
            return None
        if not rows or min(map(len, rows)) < 8:
            return None
        # user, nice, system, idle, iowait, irq, softirq, steal
        worked = sum(sum(row[:3]) + row[5] + row[6] for row in rows)
        return cls(time.monotonic(), worked / ticks, sum(row[7] for row in rows) / ticks, time.process_time())

    def since(self, before: LoadSample, processors: int, threads: int) -> MachineLoad:
        """What happened since another sample. ``threads`` of the timed work run on ``processors``."""
        # counters move in hundredths of a second: of a shorter time they say nothing
        seconds = max(self.at - before.at, 0.2)
        free = seconds * max(0, processors - threads)
        others = self.worked - before.worked - (self.own - before.own) - free
        return MachineLoad(stolen=max(0.0, self.stolen - before.stolen) / (seconds * processors),
                           others=max(0.0, others) / (seconds * processors))


def timed_quietly(run: Callable[[], Timed], spread: Callable[[Timed], float],
                  threads: int | None) -> tuple[Timed, MachineLoad | None]:
    """Time something; again while the machine is busy or the runs differ much, :data:`ROUNDS` times at most.

    Args:
        run: does what is timed.
        spread: result of ``run`` → the range of its runs over their median.
        threads: the threads that it works with; ``None``: it works on a GPU, whose speed hardly depends on
            what the processors do beside it.

    Returns:
        What was timed while the machine was least busy, and how busy it was; ``None``: that isn't known, or
        doesn't matter.
    """
    best: tuple[float, Timed, MachineLoad | None] | None = None
    for _ in range(ROUNDS):
        before = LoadSample.now()
        result = run()
        after = LoadSample.now()
        load = after.since(before, len(os.sched_getaffinity(0)), threads) if (
            before and after and threads is not None) else None
        noise = max(load.worst if load else 0.0, spread(result) / MAX_SPREAD)
        if best is None or noise < best[0]:
            best = noise, result, load
        if noise <= 1:
            break
    assert best is not None
    return best[1], best[2]


def busy_reason(load: MachineLoad | None) -> str | None:
    """Why speeds that were timed under this load aren't shown; ``None``: they are."""
    if load is None or load.worst <= 1:
        return None
    parts = [f"up to {100 * share:.0f}% of the processors' time went to {whom}" for share, whom, limit in (
        (load.others, "other programs", MAX_OTHERS), (load.stolen, "other machines of the host", MAX_STOLEN))
             if share > limit]
    return f"the machine was busy: {' and '.join(parts)}"


def busy_now() -> str | None:
    """A sentence for people if programs kept three quarters of the processors busy in the last minute;
    ``None``: they didn't, or it isn't known."""
    with suppress(OSError, ValueError, IndexError):
        load, processors = float(LOADAVG.read_text(encoding="ascii").split()[0]), os.cpu_count() or 1
        if load > 0.75 * processors:
            return (f"this machine is busy (load {load:.1f} on {processors} processors): speeds are timed up "
                    f"to {ROUNDS} times, and left out if it stays so")
    return None
