"""Progress with an ETA on stderr: a bar on a terminal, a line every tenth elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from quantkit.cli.present import note
from quantkit.progress import ProgressEvent

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID


class CompileNotice:
    """Says once that kernels are compiled for this machine, and now and then how long that will take."""

    def __init__(self) -> None:
        self._begun = self._said = 0.0

    def __call__(self, step: ProgressEvent) -> None:
        """Take in one report."""
        now = time.monotonic()
        if step.done == 0:
            self._begun = self._said = now
            note(f"compiling {step.total} kernels for this CPU; the next time they are there")
        elif step.done < step.total and now - self._said > 1:
            self._said = now
            seconds_left = (now - self._begun) * (step.total - step.done) / step.done
            note(f"compiling: {step.done} of {step.total}, about {seconds_left:.0f} s left")


class ProgressLine:
    """Give it to long work as its callback; use it in a ``with``.

    Args:
        title: stands before the bar.
        quiet: say nothing.
    """

    def __init__(self, title: str, quiet: bool = False) -> None:
        self.title, self.quiet = title, quiet
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._started: float | None = None
        self._total, self._first, self._tenths = 0, 0, 0

    def __enter__(self) -> ProgressLine:
        if not self.quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn(),
                            TimeRemainingColumn(), console=Console(stderr=True))
            self._bar.start()
        return self

    def __call__(self, step: ProgressEvent) -> None:
        """Take in one report."""
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task(self.title, total=step.total, completed=step.done)
            self._bar.update(self._task, completed=step.done, total=step.total,
                             description=f"{self.title}  {step.label}")
        elif not self.quiet:
            self._line(step)

    def _line(self, step: ProgressEvent) -> None:
        if self._started is None or step.total != self._total:
            # the first report, or the work has come to a part that counts other things
            self._started, self._first = time.monotonic(), step.done
            self._total, self._tenths = step.total, 0
        tenths = 10 * step.done // step.total if step.total else 10
        if tenths <= self._tenths:
            return
        self._tenths = tenths
        spent = time.monotonic() - self._started
        moved = step.done - self._first
        eta = f", about {spent * (step.total - step.done) / moved:.0f} s left" if moved > 0 and (
            step.done < step.total) else ""
        note(f"{self.title}: {step.done} of {step.total}{eta}")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
