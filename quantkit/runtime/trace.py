"""What an engine did and when: spans of its requests and of its steps, the last ones of both."""

from __future__ import annotations

import bisect
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from quantkit.runtime.core import Request, RequestLabel, StepOutput, StepPlan

TRACE_SIZE = 2**16
"""Spans and steps that a trace keeps."""
SpanKind = Literal["queue", "prefill", "decode", "preempted", "end"]


class RequestSpan(NamedTuple):
    """What a request did for a while.

    Attributes:
        number: the request's within its engine.
        label: names the request.
        kind: ``queue``: it waited for its first chunk, or for the next one after a preemption; ``prefill``: a
            chunk of its text was computed; ``decode``: it got tokens; ``preempted`` and ``end`` are instants.
        start, end: seconds of the engine's clock.
        recorded: the time at which the trace got it: the step's end, or at once.
        tokens: the tokens that were computed (prefill) or that it got (decode).
        cached: tokens before the first chunk behind a wait that the prefix cache had.
        drafted, accepted: tokens that were drafted for it, and those of them that were right, if there was a
            draft; where it writes blocks, masks before the step, and those of them that it committed.
        reason: why it ended: ``stop``, ``length``, ``cancelled`` or ``error``.
    """

    number: int
    label: RequestLabel
    kind: SpanKind
    start: float
    end: float
    recorded: float
    tokens: int | None = None
    cached: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    reason: str | None = None

    @property
    def details(self) -> dict[str, int | str]:
        """What applies to its kind, by name."""
        values = self._asdict()
        return {key: values[key] for key in ("tokens", "cached", "drafted", "accepted", "reason")
                if values[key] is not None}


class StepSpan(NamedTuple):
    """One step of an engine.

    Attributes:
        start, end: seconds of the engine's clock.
        decode_rows: requests behind their prompts.
        prompt_tokens: tokens of prompts that were computed.
        drafted, accepted: those of requests.
        tokens: the tokens that requests got.
    """

    start: float
    end: float
    decode_rows: int
    prompt_tokens: int
    drafted: int
    accepted: int
    tokens: int

    @property
    def recorded(self) -> float:
        """When it came into the trace."""
        return self.end


@dataclass
class Timing:
    """Seconds and tokens: all prompts' prefill, and the decode steps. What a prompt waits for on a GPU while
    others decode there counts as the prompt's."""

    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_tokens: int = 0
    decode_s: float = 0.0

    def add(self, reads: bool, prompt_tokens: int, decoded: int, seconds: float, rows: int) -> None:
        """Add a step, shared out by tokens where it had both kinds.

        Args:
            reads: whether it took prompts further.
            prompt_tokens, decoded: tokens of prompts, and of answers.
            rows: what was computed for those of answers.
        """
        share = prompt_tokens / ((prompt_tokens + rows) or 1) if rows else float(reads)
        self.prefill_tokens += prompt_tokens
        self.prefill_s += share * seconds
        self.decode_tokens += decoded
        self.decode_s += (1 - share) * seconds


class Trace:
    """Records the last spans. It has counts and times, and neither texts nor token ids.

    The engine's thread records. :meth:`read` may be called from any.

    Args:
        clock: tells seconds; the engine's.
        size: spans and steps that are kept.

    Attributes:
        recorded: spans and steps so far, those that are no longer kept included.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, size: int = TRACE_SIZE) -> None:
        self._clock = clock
        self._ring: deque[RequestSpan | StepSpan] = deque(maxlen=size)
        # held while something is recorded, so that a reader that has read the clock gets all until then
        self._lock = threading.Lock()
        self._begin = self._now = 0.0
        self._chunks: dict[int, int] = {}  # by a request's number, what was computed of it before the step
        self._tokens = self._drafted = self._accepted = 0  # since the last step ended
        self.recorded = 0

    def read(self, since: float = float("-inf"), until: float = float("inf")
             ) -> list[RequestSpan | StepSpan]:
        """What was recorded after ``since`` and not after ``until``, seconds, in that order. Calls whose
        intervals adjoin get everything once, if ``until`` is not in the future."""
        with self._lock:
            spans = list(self._ring)
        first = bisect.bisect_right(spans, since, key=lambda span: span.recorded)
        last = bisect.bisect_right(spans, until, key=lambda span: span.recorded)
        return spans[first:last]

    def begin_step(self, begin: float, step: StepPlan) -> None:
        """A step runs from ``begin`` on."""
        self._begin = begin
        self._chunks = {request.id: request.kv.computed_tokens for request in step.reading}

    def end_step(self, step: StepPlan, output: StepOutput) -> None:
        """The step has ended, but for requests that end with it: what came of it."""
        with self._lock:
            now = self._now = self._clock()
            for request in step.decode:
                self._decoded(request, max(self._begin, request.trace.since), now)
            for request in step.reading:
                self._advance(request, output.computed_at)
            self._append(StepSpan(self._begin, now, len(step.decode), output.prompt_tokens, self._drafted,
                                  self._accepted, self._tokens))
            self._tokens = self._drafted = self._accepted = 0

    def preempted(self, request: Request) -> None:
        """A request is about to give up its pages and to wait again."""
        with self._lock:
            self._leave(request)
            self._add(request, "preempted", self._now, self._now)
            request.trace.is_waiting = True

    def ended(self, requests: Sequence[Request]) -> None:
        """Requests have ended. One that isn't finished has failed."""
        with self._lock:
            for request in requests:
                if not request.trace.ended:
                    request.trace.ended = True
                    self._leave(request)
                    reason = request.result.finish_reason if request.done else "error"
                    self._add(request, "end", self._now, self._now,
                              reason="stop" if reason == "stop_string" else reason)

    def _leave(self, request: Request) -> None:
        """Record what a request did until now."""
        self._now = self._clock()
        self._advance(request, self._now)
        if request.trace.is_waiting:
            self._add(request, "queue", request.trace.since, self._now)

    def _advance(self, request: Request, computed_at: float) -> None:
        """Record what a request got until now in the step that is under way, or between two steps.

        Args:
            request: a request that may have been in it.
            computed_at: the time at which a chunk of its text was computed; then a token is chosen.
        """
        state = request.trace
        start = max(self._begin, state.since)
        before = self._chunks.pop(request.id, None)
        if before is not None:
            cached = None
            if state.is_waiting:
                self._add(request, "queue", state.since, start)
                state.is_waiting, cached = False, before
            self._add(request, "prefill", start, computed_at, request.kv.computed_tokens - before, cached)
            start = computed_at
        self._decoded(request, start, self._now)

    def _decoded(self, request: Request, start: float, end: float) -> None:
        """Record tokens that a request got since its last span."""
        state, result = request.trace, request.result
        tokens, drafted = len(result.token_ids) - state.tokens, result.drafted_tokens - state.drafted
        if not tokens and not drafted:
            return
        if state.is_waiting:  # the prompt is shorter than a block, and read with it
            self._add(request, "queue", state.since, start)
            state.is_waiting = False
        state.tokens += tokens
        self._tokens += tokens
        if not drafted:
            self._add(request, "decode", start, end, tokens)
            return
        accepted = result.accepted_tokens - state.accepted
        self._add(request, "decode", start, end, tokens, None, drafted, accepted)
        state.drafted += drafted
        state.accepted += accepted
        self._drafted += drafted
        self._accepted += accepted

    def _add(self, request: Request, kind: SpanKind, start: float, end: float, tokens: int | None = None,
             cached: int | None = None, drafted: int | None = None, accepted: int | None = None,
             reason: str | None = None) -> None:
        request.trace.since = end
        self._append(RequestSpan(request.id, request.label, kind, start, end, self._now, tokens, cached,
                                 drafted, accepted, reason))

    def _append(self, span: RequestSpan | StepSpan) -> None:
        self._ring.append(span)
        self.recorded += 1
