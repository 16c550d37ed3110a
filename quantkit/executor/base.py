"""The interface of executors, which run independent work."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Item = tuple[str, tuple[Any, ...]]
"""What a piece of work is called in messages, and its arguments."""


class Executor(Protocol):
    """Does work whose pieces don't depend on each other. The results are the same bits wherever that happens.

    Attributes:
        remote: work is done in other processes, which open the model themselves.
    """

    remote: bool

    def put(self, value: T) -> T:
        """What stands for a large argument that several pieces share."""

    def map(self, work: Callable[..., T], items: Iterable[Item]) -> Generator[T, None, None]:
        """``work`` on the arguments of every item: results in the items' order. Only as many items are taken
        ahead as can be worked on, and closing it drops what was begun. An argument must not be written to.

        Raises:
            QuantkitError: what the work raised; or a process died, with the item's name.
        """

    def close(self) -> None:
        """End what this started."""
