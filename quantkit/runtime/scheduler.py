"""Decides what runs in a step: which request's prompt is read, and which requests decode.

Requests wait in the order in which they came. One prompt is read at a time, while all requests behind their
prompts decode side by side. This file is the only one that admits requests and the only one that ends them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from quantkit.errors import QuantkitError
from quantkit.kv.cache import KVCache
from quantkit.kv.reservation import PageReservation
from quantkit.runtime.request import Request, Status


class EngineFull(QuantkitError):
    """The queue is full."""


class EngineClosed(QuantkitError):
    """The engine takes no more requests."""


class Scheduler:
    """The requests of an engine, by their status.

    :meth:`submit`, :meth:`refuse_more` and :meth:`wait_until_idle` may be called from any thread; everything
    else belongs to the engine's.

    Args:
        cache: holds the requests' sequences.
        reservation: hands out the cache's pages if its memory is fixed; else ``None``.
        max_batch: requests that decode side by side.
        max_queue: requests that may wait.

    Attributes:
        prefilling: the request whose prompt is read.
        decoding: requests that decode, in the order in which their prompts ended.
        changed: notified when requests come or end, and when the engine is closed.
        closed: whether the engine is closed.
    """

    def __init__(self, cache: KVCache, reservation: PageReservation | None, max_batch: int,
                 max_queue: int) -> None:
        self._cache, self._reservation = cache, reservation
        self._max_batch, self._max_queue = max_batch, max_queue
        self._waiting: deque[Request] = deque()
        self.prefilling: Request | None = None
        self.decoding: list[Request] = []
        self.changed = threading.Condition()
        self.closed = self._refuses = False

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Number of requests whose prompt is read or that decode."""
        return len(self.decoding) + (self.prefilling is not None)

    @property
    def requests(self) -> list[Request]:
        """All requests that haven't ended."""
        return [*self._waiting, *([self.prefilling] if self.prefilling else []), *self.decoding]

    @property
    def busy(self) -> bool:
        """Whether there are any."""
        return bool(self._waiting or self.prefilling or self.decoding)

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            EngineClosed: no more requests are taken.
            EngineFull: too many wait.
        """
        with self.changed:
            if self._refuses:
                raise EngineClosed("no more requests are taken", why="it is about to end")
            if len(self._waiting) >= self._max_queue:
                raise EngineFull(f"{len(self._waiting)} requests wait already", why="the queue is full",
                                 next="try again in a moment, or start with a larger --max-queue")
            self._waiting.append(request)
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
        """Requests whose end somebody asked for."""
        with self.changed:
            return [request for request in self.requests if request.cancelled]

    def admit(self) -> Request | None:
        """Begin with the first waiting request if there is room for it.

        Returns:
            That request: its status is ``PREFILL`` now.
        """
        with self.changed:
            if not self._waiting or self.prefilling is not None or len(self.decoding) >= self._max_batch:
                return None
            request = self._waiting[0]  # it still waits if anything fails here
            if self._reservation is not None and not self._reservation.fits(request.max_length):
                return None
            request.sequence = self._cache.add(request.max_length)
            if self._reservation is not None:
                self._reservation.reserve(request.sequence, request.max_length)
            self.prefilling = self._waiting.popleft()
            request.status = Status.PREFILL
            return request

    def start_decoding(self) -> None:
        """The prompt has been read: its request decodes from now on."""
        request = self.prefilling
        assert request is not None
        if self._reservation is not None:
            self._reservation.shrink_to_answer(request.sequence)
        request.status = Status.DECODE
        self.decoding.append(request)
        self.prefilling = None

    def end(self, requests: Sequence[Request]) -> None:
        """Forget requests and give back their memory."""
        ended = set(map(id, requests))
        with self.changed:
            for request in [request for request in self._waiting if id(request) in ended]:
                self._waiting.remove(request)
        if self.prefilling is not None and id(self.prefilling) in ended:
            self.prefilling = None
        self.decoding = [request for request in self.decoding if id(request) not in ended]
        admitted = [request.sequence for request in requests if request.sequence >= 0]
        self._cache.free(admitted)
        if self._reservation is not None:
            for sequence in admitted:
                self._reservation.release(sequence)
