"""Progress with phases and an ETA: a bar on a terminal and in a notebook, a line every tenth elsewhere."""

from __future__ import annotations

import functools
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar

import click

from quantkit.support.progress import Listener, ProgressEvent, WorkPhase
from quantkit_kernels.kept import cache_folder, is_writable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

MIN_SECONDS, MIN_UNITS = 5.0, 3
"""What an estimate rests on at least; of fewer units than six in all, half of them are enough."""
MIN_SHARE = 0.25
"""The share of a unit that is enough, where steps within units are reported."""
DETAIL_SECONDS = 30.0
"""Off a terminal: seconds without a line after which a step within a unit gets one."""
MAX_GROWTH = 1.5
"""How much longer than the one that was shown before an estimate may be: one slow unit isn't a slow rest."""
_MEMORY = 0.2
"""The share of all units over which the pace is averaged."""
Progress = bool | Listener
"""Whether a bar is shown, or a function that is called with each event."""


@contextmanager
def reported(progress: Progress, title: str, after: float = 0.0) -> Iterator[Listener]:
    """A listener for long work: the function that was given, a bar with a title, or nobody. ``after`` as for
    :class:`ProgressLine`."""
    if not isinstance(progress, bool):
        yield progress
        return
    with ProgressLine(title, quiet=not progress, after=after) as line:
        yield line


class CompileNotice:
    """Says once that kernels are compiled for this machine, and now and then how long that will take."""

    def __init__(self) -> None:
        self._begun = self._said = 0.0

    def __call__(self, step: ProgressEvent) -> None:
        now = time.monotonic()
        if step.done == 0:
            self._begun = self._said = now
            folder = cache_folder()
            again = "the next time they are there" if is_writable(folder) else (
                f"this time only, as {folder or 'a cache folder'} can't be written: QUANTKIT_CACHE=DIR names "
                "another")
            _note(f"compiling {step.total} kernels for this CPU; {again}")
        elif step.done < step.total and now - self._said > 1:
            self._said = now
            seconds_left = (now - self._begun) * (step.total - step.done) / step.done
            _note(f"compiling: {step.done} of {step.total}, about {seconds_left:.0f} s left")


class ProgressLine:
    """Give it to long work as its callback; use it in a ``with``.

    The time left is that of the phase, or of what is counted; it isn't shown before enough was measured.

    Args:
        title: stands before the bar.
        quiet: nothing is printed.
        clock: seconds that pass.
        after: seconds until something of a phase, or of what is counted, is shown: what is done by then isn't
            worth a line.
    """

    _drawn: ClassVar[ProgressLine | None] = None
    """Whose bar is on the terminal, which has room for one."""

    def __init__(self, title: str, quiet: bool = False, clock: Callable[[], float] = time.monotonic,
                 after: float = 0.0) -> None:
        self.title, self.quiet = title, quiet
        self._clock, self._after = clock, after
        self._begun, self._done = 0.0, 0
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._eta = TimeLeft(clock)
        self._part: tuple[WorkPhase | None, int] | None = None
        self._tenths = 0
        self._said = 0.0

    def __enter__(self) -> ProgressLine:
        return self

    def __call__(self, step: ProgressEvent) -> None:
        begins = (step.phase, step.total) != self._part or step.done < self._done
        self._done = step.done
        if begins:
            self._begun = self._clock()
            # the first report, or the work has come to a part that counts other things
            self._part, self._tenths = (step.phase, step.total), 0
            self._eta.begin(step.done)
            self._said = self._begun
        self._eta.update(step.done + step.share, step.total, step.kept)
        if self.quiet or self._clock() - self._begun < self._after:
            return
        if _draws_bars():
            self._draw(self._bar or self._new_bar(), step)
        else:
            self._line(step, begins)

    def _new_bar(self) -> Bar:
        """The bar, on the terminal instead of another's."""
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar
        from rich.text import Text

        class DetailedBar(Bar):
            """With a line below that says what is done within a unit."""

            def get_renderables(self) -> Iterator[RenderableType]:
                yield from super().get_renderables()
                for task in self.tasks:
                    if task.fields["detail"]:
                        yield Text(f"  {task.fields['detail']}", no_wrap=True, overflow="ellipsis")

        if ProgressLine._drawn is not None:
            ProgressLine._drawn.close()
        ProgressLine._drawn = self
        self._bar = DetailedBar(TextColumn("{task.description}"), BarColumn(bar_width=None),
                                TextColumn("{task.fields[counted]}"), TextColumn("{task.fields[left]}"),
                                console=Console(stderr=True))
        self._bar.start()
        return self._bar

    def _left(self) -> str:
        """``about 40 s left``, of a phase if there are phases; nothing if that isn't known."""
        seconds = self._eta.show()
        return "" if seconds is None else f"about {human_seconds(seconds)} left"

    def _draw(self, bar: Bar, step: ProgressEvent) -> None:
        if self._task is None:
            self._task = bar.add_task(self.title, total=step.total, completed=step.done, left="",
                                      counted="", detail="")
        name = _name(step.phase).capitalize() if step.phase else f"{self.title}  {step.label}"
        bar.update(self._task, completed=step.done + step.share, total=step.total, description=name,
                   left=self._left(), counted=_counted(step, "/"), detail=step.detail)

    def _line(self, step: ProgressEvent, begins: bool) -> None:
        name = f"{self.title}: {_name(step.phase)}" if step.phase else self.title
        tenths = 10 * step.done // step.total if step.total else 10
        if begins and step.phase and (step.done == 0 or tenths == 10):
            self._tenths = tenths  # how much it is need not be said
            _note(name)
        counted = tenths > self._tenths
        if not counted and not (step.detail and self._clock() - self._said >= DETAIL_SECONDS):
            return
        self._tenths, self._said = max(tenths, self._tenths), self._clock()
        left = self._left()
        where = " in this phase" if step.phase and step.phase.total > 1 else ""
        what = _counted(step, " of ") if counted else step.detail
        _note(f"{name}: {what}" + (f", {left}{where}" if left else ""))

    def close(self) -> None:
        """Leave the bar as it is, if there is one."""
        if self._bar is not None:
            self._bar.stop()
        if ProgressLine._drawn is self:
            ProgressLine._drawn = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


def _note(text: str) -> None:
    click.echo(text, err=True)


@functools.cache
def _is_notebook() -> bool:
    """Whether a bar can be shown as a widget."""
    from rich.console import Console

    return Console(stderr=True).is_jupyter and importlib.util.find_spec("ipywidgets") is not None


def _draws_bars() -> bool:
    return sys.stderr.isatty() or ("ipykernel" in sys.modules and _is_notebook())


def _name(phase: WorkPhase) -> str:
    """``phase 2 of 4, measuring candidates``."""
    return f"phase {phase.number} of {phase.total}, {phase.name}"


def _counted(step: ProgressEvent, between: str) -> str:
    """``3 of 10 layers``; of shares ``33%``."""
    if step.unit == "%":
        return f"{100 * step.done // max(1, step.total)}%"
    return f"{step.done:,}{between}{step.total:,} {step.unit}".rstrip()


class TimeLeft:
    """The seconds left of one phase; :meth:`begin` it anew for each.

    Args:
        clock: seconds that pass.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.begin(0)

    def begin(self, done: float) -> None:
        """Forget everything: ``done`` units are finished, and what comes is measured from now on."""
        self._start = self._last = self._clock()
        self._first = self._done = float(done)
        self._by_steps = False
        self._pace: float | None = None
        self._shown: float | None = None
        self._kept, self._total = False, done

    def update(self, done: float, total: int, kept: bool = False) -> None:
        """Take in a report.

        Args:
            done, total: units; a fraction says that steps within units are reported.
            kept: the unit that begins was finished by an earlier attempt; its time doesn't count.
        """
        if self._kept:
            self.begin(done)
        self._kept = kept
        self._by_steps |= done % 1 > 0
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
        enough = MIN_SHARE if self._by_steps else min(MIN_UNITS, math.ceil((self._total - self._first) / 2))
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
