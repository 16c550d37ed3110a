"""A lock that is handed on in the order in which it was asked for."""

from __future__ import annotations

import threading
from types import TracebackType


class Turns:
    """Engines that share a device take turns. A plain lock could go to the same thread again and again,
    because whoever lets go of it is awake and can take it back before another wakes up."""

    def __init__(self) -> None:
        self._running, self._next = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        with self._next:  # whoever waits for the lock holds this one, so that nobody overtakes
            self._running.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._running.release()
