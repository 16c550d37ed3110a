"""Decides what runs in a step: which requests get their next token, and which prompts go on by how much.

Requests wait by priority, then in the order in which they came. A step decodes a token of every request
behind its prompt, and reads prompts within a budget of tokens. A short prompt goes before a long one that
came a little earlier: one of n tokens lets pass only what would be read before ``DEADLINE_FACTOR`` · n
further tokens, so none waits for ever. Where pages run out, the last request gives up its own and waits
again; what it had is computed anew. This file is the only one that admits requests and the only one that ends
them. Its :class:`ChunkSizer` says how many prompt tokens go through the model between two tokens of the
sequences that decode beside them.
"""

from __future__ import annotations

import bisect
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from statistics import median, median_low

from quantkit.runtime.core import EngineClosed, EngineFull, Request, StepPlan
from quantkit.runtime.trace import Trace

DEADLINE_FACTOR = 3
"""A prompt that is n tokens shorter passes another one if it arrives before 3 · n further tokens have been
read. A larger factor shortens the median time to the first token and lengthens that of long prompts."""


class Scheduler:
    """The requests of an engine, by their status.

    :meth:`submit`, :meth:`refuse_more` and :meth:`wait_until_idle` may be called from any thread; everything
    else belongs to the engine's.

    Args:
        max_batch: requests that run side by side.
        max_queue: requests that may wait.
        chunk: prompt tokens of a step, at most.
        trace: is told which requests give up their pages, and which end.

    Attributes:
        prefilling: requests whose prompt is read, in the order of their deadlines.
        decoding: requests that decode, in the order in which their prompts ended.
        preemptions: how often a request gave up its pages.
        changed: notified when requests come or end, and when the engine is closed.
        closed: whether the engine is closed.
    """

    def __init__(self, max_batch: int, max_queue: int, chunk: int, trace: Trace) -> None:
        self._max_batch = max_batch
        self._max_queue = max_queue
        self._chunk = chunk
        self._trace = trace
        self._waiting: list[Request] = []
        self.prefilling: list[Request] = []
        self.decoding: list[Request] = []
        self.preemptions = 0
        self._read = 0  # prompt tokens of all steps so far
        self._version = 0  # of what is free; a request that found no room looks again when it changed
        self._no_room: tuple[int, int] | None = None
        self.changed = threading.Condition()
        self.closed = self._refuses = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Number of requests whose prompt is read or that decode."""
        return len(self.decoding) + len(self.prefilling)

    @property
    def requests(self) -> list[Request]:
        return [*self._waiting, *self.prefilling, *self.decoding]

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self.prefilling or self.decoding)

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            EngineClosed: the engine is shutting down.
            EngineFull: too many wait.
        """
        with self.changed:
            if self._refuses:
                raise EngineClosed("the engine is shutting down", why="it takes no more requests")
            if len(self._waiting) >= self._max_queue:
                raise EngineFull(f"{len(self._waiting)} requests wait already", why="the queue is full",
                                 next="try again in a moment, or start with a larger --max-queue")
            request.schedule.arrival_tokens = self._read
            self._queue(request)
            self.changed.notify_all()

    def refuse_more(self) -> None:
        """Take no more requests from now on."""
        with self.changed:
            self._refuses = True

    def close(self) -> None:
        """Take no more requests, and wake whoever waits for some."""
        with self.changed:
            self._refuses = self.closed = True
            self.changed.notify_all()

    def wait_until_idle(self, timeout: float | None) -> bool:
        """Wait until all requests have ended, at most ``timeout`` seconds; returns whether they have."""
        with self.changed:
            return self.changed.wait_for(lambda: self.closed or not self.busy, timeout)

    def cancelled(self) -> list[Request]:
        with self.changed:
            return [request for request in self.requests if request.cancelled]

    def admit(self) -> tuple[Request, Exception] | None:
        """Begin with waiting requests, in their order, as long as there is room for the first. Returns one
        that can't begin, and why, before it looks at those behind it."""
        while self.running < self._max_batch:
            with self.changed:
                request = self._waiting[0] if self._waiting else None
            try:
                if request is None or not self._begin(request):
                    return None
            except Exception as error:  # there is no memory for what it needs
                assert request is not None
                return request, error
        return None

    @property
    def may_preempt(self) -> bool:
        """Whether a request may give up its pages in this step: one can't get its next token because pages
        have run out, or one of a higher priority waits."""
        with self.changed:
            first = self._waiting[0] if self._waiting else None
        return any(not request.kv.manager.extend(request.kv) for request in self.decoding) or (
            first is not None and any(request.priority > first.priority for request in self.decoding))

    def preempt_for_pages(self) -> None:
        """Until all that decode have a page for their next token, let the last one wait again."""
        for request in sorted(self.decoding, key=lambda request: request.order):
            while request in self.decoding and not request.kv.manager.extend(request.kv):
                self.preempt(max((other for other in (*self.prefilling, *self.decoding)
                                  if other.kv.manager is request.kv.manager), key=lambda other: other.order))

    def preempt(self, request: Request, *, keep: bool = True) -> None:
        """Let a running request give up its pages and wait again, before all that came after it.

        Args:
            keep: others may begin with what was computed of it. Not if a step failed in the middle.
        """
        self._trace.preempted(request)
        request.prefill.abandon()
        request.kv.manager.preempt(request.kv, keep=keep)
        request.restart()
        self.preemptions += 1
        self._version += 1
        with self.changed:
            self._forget(request)
            self._queue(request)

    def plan(self, budget: int) -> StepPlan:
        """What runs now.

        Args:
            budget: prompt tokens, at most; a model that keeps chunks of a fixed size may take more.
        """
        step = StepPlan(decode=list(self.decoding))
        if budget <= 0:
            return step
        step.deferred = next((request for request in self.prefilling
                              if request.prefill.deferred is not None), None)
        if step.deferred is not None:
            return step
        budget = max(1, min(budget, self._chunk - len(step.decode)))
        for request in self._reading():
            alone = request.fault.isolated or not request.kv.manager.supports_batched_prefill
            if budget <= 0 or (step.chunks and alone):
                budget = 0
                continue
            end = request.kv.manager.chunk_end(request.kv, budget)
            step.chunks.append((request, end))
            self._read += end - request.kv.computed_tokens
            budget = 0 if alone else budget - (end - request.kv.computed_tokens)
        return step

    def _reading(self) -> list[Request]:
        """Prompts that may go on, in their order. One that waits for another gives it its place.

        A request waits for those before it and for those that have begun, which don't wait themselves: so
        there is always one that goes on.
        """
        for request in self.prefilling:
            request.schedule.is_awaited = False
        order: dict[int, Request] = {}
        for place, request in enumerate(self.prefilling):
            text, manager = request.kv, request.kv.manager
            ahead = [] if text.begun else [
                other for at, other in enumerate(self.prefilling) if other.kv.manager is manager
                and (at < place or other.kv.begun) and manager.should_wait_for(text, other.kv)]
            for other in ahead:
                request.schedule.is_waiting_for_prefix = other.schedule.is_awaited = True
                if other.kv.begun:
                    order.setdefault(other.id, other)
            if not ahead:
                # even if its turn comes later: what it waited for may be gone then
                if request.schedule.is_waiting_for_prefix:
                    request.schedule.is_waiting_for_prefix = False
                    manager.restart(text)
                    request.result.cached_tokens = text.cached_tokens
                order.setdefault(request.id, request)
        return list(order.values())

    def start_decoding(self, request: Request) -> None:
        """A request's text has been computed: it decodes from now on."""
        with self.changed:
            self.prefilling.remove(request)
            self.decoding.append(request)
        self._version += 1

    def end(self, requests: Sequence[Request], *, keep: bool = True) -> None:
        """Forget requests and give back their memory. ``keep`` as for :meth:`preempt`."""
        self._trace.ended(requests)
        ended = set(map(id, requests))
        with self.changed:
            self._waiting = [request for request in self._waiting if id(request) not in ended]
        for request in requests:
            request.prefill.abandon()
            request.kv.manager.texts.discard(request.kv)
            try:
                request.kv.manager.free(request.kv, keep=keep)
            finally:  # last: who sees that nobody runs also sees that the memory is free
                self._forget(request)
        self._version += 1

    def _begin(self, request: Request) -> bool:
        """Begin with the first waiting request if there is room for it."""
        manager = request.kv.manager
        if self._no_room == (request.id, self._version) or (
                sum(other.kv.manager is manager for other in self.prefilling) >= manager.prompts):
            return False
        for other in self.prefilling:
            if other.kv.manager is manager:
                manager.keep_beginning(other.kv, request.kv)
        while not manager.begin(request.kv):
            running = [other for other in (*self.prefilling, *self.decoding) if other.kv.manager is manager]
            last = max(running, key=lambda other: other.order, default=None)
            if last is None or last.priority <= request.priority:
                self._no_room = request.id, self._version
                return False
            self.preempt(last)
        request.result.cached_tokens = request.kv.cached_tokens
        schedule = request.schedule
        with self.changed:
            self._waiting.remove(request)
            schedule.deadline_tokens = schedule.arrival_tokens + DEADLINE_FACTOR * (
                request.kv.length - request.kv.computed_tokens)
            bisect.insort(self.prefilling, request,
                          key=lambda other: (other.priority, other.schedule.deadline_tokens, other.id))
        if not schedule.admitted_at:
            schedule.admitted_at = time.perf_counter()
        return True

    def _queue(self, request: Request) -> None:
        bisect.insort(self._waiting, request, key=lambda other: other.order)

    def _forget(self, request: Request) -> None:
        """Let go of a running request's place and of what its policy had left to do."""
        request.prefill.abandon()
        for requests in (self.prefilling, self.decoding):
            if request in requests:
                requests.remove(request)


SLOWDOWN = 3
"""The largest allowed gap between tokens, as a multiple of the usual gap, where that is above the limit."""
AIM = 0.95
"""Part of the longest gap that a chunk is sized for: two steps never take exactly the same time."""
LEAST = 16
"""The least number of a prompt's tokens in a step, on any machine. With fewer, most of the time would
be what any chunk takes, however small."""
REFRESH = 64
"""Steps with chunks after which one without a chunk shows the usual gap again."""
GAPS, CHUNKS = 15, 3
"""The number of recent measurements whose median counts, so that a disturbed one doesn't."""
BASELINE_STEPS = 2
"""Steps without a chunk that measure the usual gap after the number of sequences has changed. The shorter one
counts. With a single one that other work slowed down, the next chunks could take three times that long."""


class ChunkSizer:
    """Sizes the chunks of prompts by measured time, so that gaps between others' tokens stay short.

    The next chunk is what fits beside a usual decode step if a token costs what it did in the last chunks.
    Their fixed cost is in that, and attention's to a context that grows: both change little from a chunk to
    the next. A chunk is at most twice as large as the largest of those, so that nothing is risked on a guess.

    Args:
        largest: tokens of a chunk, at most.
        max_itl: seconds between two tokens of a sequence, or :data:`SLOWDOWN` times the usual gap if that is
            more. ``None``: every chunk is the largest.
        least: tokens of a chunk, at least.
    """

    def __init__(self, largest: int, max_itl: float | None, least: int = LEAST) -> None:
        self._largest, self._max_itl, self._least = largest, max_itl, least
        self._gaps: deque[float] = deque(maxlen=GAPS)
        self._chunks: deque[tuple[int, float]] = deque(maxlen=CHUNKS)  # tokens, and seconds of each token
        self._running = 0  # tokens of the chunk that a device was given in the last step
        self._rows = self._age = 0  # sequences whose usual gap is known, and steps with chunks since then

    def tokens_in(self, seconds: float) -> int:
        """Tokens of the next chunk while others decode, if it may take so long."""
        if self._max_itl is None:
            return self._largest
        least = min(self._least, self._largest)
        if not self._chunks:
            return least
        fits = int(seconds / median(cost for _, cost in self._chunks))
        tried = max(tokens for tokens, _ in self._chunks)
        return max(least, min(fits, 2 * tried, self._largest))

    def begin(self, rows: int) -> None:
        """A step in which ``rows`` sequences decode begins. What was usual with fewer or more isn't now."""
        if abs(rows - self._rows) * 4 > self._rows:
            self._rows = rows
            self._gaps.clear()

    @property
    def blind(self) -> bool:
        """Whether the usual gap isn't known, or was measured long ago: steps without a chunk show it."""
        return self._max_itl is not None and (len(self._gaps) < BASELINE_STEPS or self._age >= REFRESH)

    @property
    def spare(self) -> float:
        """Seconds of a gap that are a prompt's."""
        return math.inf if self._max_itl is None else AIM * self.longest_gap - self._usual

    @property
    def longest_gap(self) -> float:
        """Seconds between two tokens, at most."""
        return max(self._max_itl or 0.0, SLOWDOWN * self._usual)

    @property
    def _usual(self) -> float:
        return median_low(self._gaps) if self._gaps else 0.0

    def observe(self, seconds: float, tokens: int, *, ahead: bool = False) -> None:
        """Learn from a step in which others decoded.

        Args:
            tokens: the tokens of the chunk that it ran; 0: none.
            ahead: it waited for what a device was given in the step before, and its own chunk still runs.
        """
        if ahead:
            tokens, self._running = self._running, tokens
        else:
            self._running = 0
        if not tokens:
            self._gaps.append(seconds)
            self._age = 0
            return
        self._age += 1
        # where a step's time varies by more than the chunk takes, the chunk still takes something
        self._chunks.append((tokens, max(seconds - self._usual, seconds / 10) / tokens))

    def skip(self) -> None:
        """A step that says nothing: nobody decoded, or a prompt ended and its policy acted."""
        self._running = 0
