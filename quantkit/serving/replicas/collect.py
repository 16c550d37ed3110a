"""What several replicas answer within a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

T = TypeVar("T")


async def collect(pending: Iterable[Awaitable[T]], seconds: float) -> list[T]:
    """The results that come in time, in the order of their senders; failures are left out.

    Args:
        pending: one for each sender. Those that take longer are cancelled.
        seconds: for all of them.
    """
    tasks = [asyncio.ensure_future(awaitable) for awaitable in pending]
    if not tasks:
        return []
    done, late = await asyncio.wait(tasks, timeout=seconds)
    for task in late:
        task.cancel()
    return [task.result() for task in tasks
            if task in done and not task.cancelled() and task.exception() is None]
