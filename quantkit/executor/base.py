"""Executors run work whose pieces don't depend on each other."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
Item = tuple[str, tuple[Any, ...]]
"""What a piece of work is called in messages, and its arguments."""


@dataclass(frozen=True)
class TaskNeeds:
    """What a task takes of the machine that does it.

    Attributes:
        gpus: The number of GPUs.
        memory: The estimated bytes; 0 if they are unknown.
        alone: Whether nothing else may run beside it on its machine, because it is timed.
    """

    gpus: int = 0
    memory: int = 0
    alone: bool = False


class Task(NamedTuple):
    """Work of its own kind among others.

    Attributes:
        label: The name of the task in messages.
        arguments: The arguments of the work.
        needs: The resources that it takes of its machine.
    """

    label: str
    arguments: tuple[Any, ...]
    needs: TaskNeeds = TaskNeeds()


class Executor:
    """Does work in this process: one piece's arguments are in memory at a time, and torch shares each piece
    out to its threads. Subclasses do it elsewhere; the results are the same bits wherever that happens.

    Attributes:
        remote: Whether work is done in other processes, which open the model themselves.
    """

    remote = False

    def put(self, value: T) -> T:
        """What stands for a large argument that several pieces share."""
        return value

    def map(self, work: Callable[..., T], items: Iterable[Item]) -> Generator[T, None, None]:
        """``work`` on the arguments of every item: results in the items' order. Only as many items are taken
        ahead as can be worked on, and closing it drops what was begun. An argument must not be written to.

        Raises:
            QuantkitError: the work raised it, or a process died; the message then names the item.
        """
        for item in items:
            result = work(*item[1])
            del item
            yield result

    def as_completed(self, work: Callable[..., T], tasks: Sequence[Task]) -> Generator[tuple[int, T], None,
                                                                                       None]:
        """``work`` on the arguments of every task, as they are done: each one's number and its result. A task
        whose process is lost is done again. Closing it drops what was begun.

        Raises:
            QuantkitError: the work raised it, or a process died too often; the message then names the task.
        """
        for number, task in enumerate(tasks):
            yield number, work(*task.arguments)

    def close(self) -> None:
        """End what this started."""
