"""Runs work in threads outside of the event loop, with limits on running and waiting calls."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

from quantkit.runtime.core import EngineFull

T = TypeVar("T")


class BoundedThreads:
    """Runs functions off the event loop.

    Args:
        running: the largest number of calls that run at once.
        waiting: the largest number of calls that wait for one of them to end.
    """

    def __init__(self, running: int, waiting: int) -> None:
        self._free = asyncio.Semaphore(running)
        self._max_waiting = waiting
        self._waiting = 0

    async def run(self, function: Callable[[], T]) -> T:
        """What ``function`` returns or raises; it sees the caller's context variables. Who is cancelled while
        it waits is dropped; what has begun goes on to its end and counts until then.

        Raises:
            EngineFull: too many wait.
        """
        if self._waiting >= self._max_waiting:
            raise EngineFull(f"{self._waiting} requests wait for a thread", why="those before them take time",
                             next="try again in a moment")
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def tell(result: T | None, error: BaseException | None) -> None:
            self._free.release()
            if done.cancelled():
                return
            if error is None:
                done.set_result(result)  # type: ignore[arg-type]
            else:
                done.set_exception(error)

        def work() -> None:
            result, error = None, None
            try:
                result = function()
            except BaseException as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server is gone
                loop.call_soon_threadsafe(tell, result, error)

        # a thread each rather than a pool, whose threads would keep the process from ending
        try:
            threading.Thread(target=contextvars.copy_context().run, args=[work], name="quantkit-prepare",
                             daemon=True).start()
        except BaseException:  # the system has no thread left: the next request may find one
            self._free.release()
            raise
        return await done
