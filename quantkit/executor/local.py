"""Runs work in this process, one piece after another."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from quantkit.executor.base import Item

T = TypeVar("T")


class LocalExecutor:
    """This process: one piece's arguments are in memory at a time. torch shares each out to its threads."""

    remote = False

    def put(self, value: T) -> T:
        """The value itself."""
        return value

    def map(self, work: Callable[..., T], items: Iterable[Item]) -> Generator[T, None, None]:
        """See :meth:`Executor.map`."""
        for item in items:
            result = work(*item[1])
            del item
            yield result

    def close(self) -> None:
        """Nothing was started."""
