"""The lock of a device that several engines share."""

from __future__ import annotations

import threading
from types import TracebackType


class FairLock:
    """Held by an engine during a step. Whoever lets go of it gets it back after somebody who waits; a plain
    lock could go to the same thread again and again, because that one is awake and can take it before
    another wakes up.

    It also says whose requests decode, so that an engine can keep its prompts' chunks small beside them.
    """

    def __init__(self) -> None:
        self._running, self._next = threading.Lock(), threading.Lock()
        self._decoding: set[object] = set()

    def __enter__(self) -> None:
        with self._next:  # one of those who wait holds this one, so that who lets go can't overtake it
            self._running.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._running.release()

    def decodes(self, engine: object, whether: bool) -> None:
        """Note at the end of a step whether requests of an engine will decode in its next one."""
        if whether:
            self._decoding.add(engine)
        else:
            self._decoding.discard(engine)

    def others_decode(self, engine: object) -> bool:
        """Whether requests of another engine wait for their next token meanwhile."""
        return bool(self._decoding - {engine})
