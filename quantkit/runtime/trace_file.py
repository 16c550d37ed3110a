"""Traces as a file that ui.perfetto.dev and chrome://tracing open, written while engines run."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from quantkit.plugins.registry import described
from quantkit.runtime.trace import RequestSpan, StepSpan
from quantkit.support.errors import QuantkitError, UsageError

if TYPE_CHECKING:
    from quantkit.runtime.engine import Engine

POLL_SECONDS = 0.1
"""Between two looks at the engines. A trace in memory keeps far more spans than come in that time."""
Event = dict[str, Any]


@dataclass
class _Source:
    """An engine whose trace is written.

    Attributes:
        process: its number in the file.
        name: the process's name there.
        since: the time at which its trace was read last; seconds.
        written: spans and steps so far.
        named: requests under way whose names are in the file.
    """

    process: int
    name: str
    engine: Engine
    since: float = float("-inf")
    written: int = 0
    named: set[int] = field(default_factory=set)


class TraceFile:
    """Writes engines' traces as Chrome's trace events: a process for each model, in it a thread for the
    engine's steps and one for each request. Use it in a ``with`` statement, whose end completes the file.

    A thread of its own writes what is new ten times a second, because a trace in memory has the last spans
    only. The events are an array, not an object, because readers accept an array without its end: that is
    what a crash leaves.

    Args:
        path: replaced if it exists.

    Raises:
        UsageError: at the begin: the file can't be written.
        QuantkitError: at the end: not all of it could be.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._origin = path, time.perf_counter()
        self._sources: list[_Source] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="quantkit-trace", daemon=True)
        self._failure: Exception | None = None

    def __enter__(self) -> TraceFile:
        try:
            self._file = self._path.open("w", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"the trace can't be written to {self._path}", why=error.strerror or str(error),
                             next="choose another --trace") from None
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self._ending.set()
        self._thread.join()
        if self._failure is not None and error is None:
            full = isinstance(self._failure, OSError)
            raise QuantkitError(f"the trace in {self._path} is not complete", why=described(self._failure),
                                next="free some space" if full else None)

    def add(self, name: str, engine: Engine) -> None:
        """Write what an engine does, as the process of this name."""
        self._sources.append(_Source(len(self._sources) + 1, name, engine))

    def _follow(self) -> None:
        """Write until the end comes or the file can't take more."""
        separator = "["
        try:
            with self._file as file:
                last = False
                while not last:
                    last = self._ending.wait(POLL_SECONDS)
                    for source in list(self._sources):
                        for event in self._news(source, last):
                            file.write(f"{separator}\n{json.dumps(event, separators=(',', ':'))}")
                            separator = ","
                    file.flush()
                file.write(f"{'[' if separator == '[' else ''}\n]\n")
        except Exception as error:
            self._failure = error

    def _news(self, source: _Source, last: bool) -> Iterator[Event]:
        """Events of what an engine did since it was asked before."""
        process, now = source.process, time.perf_counter()
        if source.since == float("-inf"):
            yield _name("process_name", process, 0, source.name)
            yield _name("thread_name", process, 0, "steps of the engine")
        spans = source.engine.trace.read(source.since, now)
        source.since, source.written = now, source.written + len(spans)
        for span in spans:
            yield from self._step(process, span) if isinstance(span, StepSpan) else self._span(source, span)
        if spans:
            yield self._counter(process, "KV cache bytes", now, source.engine.stats()["kv_used_bytes"])
        if last and (missing := source.engine.trace.recorded - source.written):
            yield self._event(process, 0, f"{missing} spans are missing", now) | {"ph": "i", "s": "p"}

    def _span(self, source: _Source, span: RequestSpan) -> Iterator[Event]:
        """A request's span, behind its name if it is the first."""
        thread = span.number + 1
        if span.number not in source.named:
            source.named.add(span.number)
            choice = "" if span.label.choice is None else f" choice {span.label.choice}"
            yield _name("thread_name", source.process, thread, span.label.id + choice)
        event = self._event(source.process, thread, span.kind, span.start) | {"args": span.details}
        if span.kind in ("preempted", "end"):
            yield event | {"ph": "i", "s": "t"}
        else:
            yield event | self._lasts(span)
        if span.kind == "end":
            source.named.discard(span.number)

    def _step(self, process: int, step: StepSpan) -> Iterator[Event]:
        """A step, and counters of what was in it."""
        counts = {key: value for key, value in step._asdict().items() if key not in ("start", "end")}
        yield self._event(process, 0, "step", step.start) | self._lasts(step) | {"args": counts}
        yield self._counter(process, "decode rows", step.start, step.decode_rows)
        yield self._counter(process, "prompt tokens", step.start, step.prompt_tokens)

    def _counter(self, process: int, name: str, at: float, value: int) -> Event:
        return self._event(process, 0, name, at) | {"ph": "C", "args": {name: value}}

    def _lasts(self, span: RequestSpan | StepSpan) -> Event:
        return {"ph": "X", "dur": self._microseconds(span.end) - self._microseconds(span.start)}

    def _event(self, process: int, thread: int, name: str, at: float) -> Event:
        return {"name": name, "pid": process, "tid": thread, "ts": self._microseconds(at)}

    def _microseconds(self, at: float) -> int:
        """Whole ones: spans that adjoin still do, and none comes to overlap another."""
        return int((at - self._origin) * 1e6)


def _name(kind: str, process: int, thread: int, name: str) -> Event:
    """The name of a process or a thread."""
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
