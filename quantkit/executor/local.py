"""Runs work in this process, one piece after another."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeVar

from quantkit.executor.base import Item, Task

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

    def as_completed(self, work: Callable[..., T], tasks: Sequence[Task]) -> Generator[tuple[int, T], None,
                                                                                       None]:
        """See :meth:`Executor.as_completed`: one after another."""
        for number, (_, arguments, _) in enumerate(tasks):
            yield number, work(*arguments)

    def close(self) -> None:
        """Nothing was started."""
