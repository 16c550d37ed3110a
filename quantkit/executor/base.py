"""What an executor is, and how its name becomes one."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any, Protocol, TypeVar

import torch

from quantkit.errors import UsageError, did_you_mean

T = TypeVar("T")
Item = tuple[str, tuple[Any, ...]]
"""What a piece of work is called in messages, and its arguments."""
NAMES = ("local", "ray")


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


def make_executor(name: str, device: torch.device) -> Executor:
    """``local`` or ``ray``, for work on ``device``. Raises what :func:`check_executor` does,
    and QuantkitError if it can't be started."""
    check_executor(name, device)
    if name == "local":
        from quantkit.executor.local import LocalExecutor

        return LocalExecutor()
    from quantkit.executor.ray import RayExecutor

    return RayExecutor()


def check_executor(name: str, device: torch.device) -> None:
    """Raises UsageError for another name or a GPU that it can't use, QuantkitError for a missing package."""
    if name not in NAMES:
        raise UsageError(f"no executor is called {name!r}", why=did_you_mean(name, NAMES),
                         next="--executor local")
    if name == "ray":
        if device.type != "cpu":
            raise UsageError(f"--executor ray doesn't go with --device {device.type}",
                             why="workers of a cluster compute on their CPUs", next="--executor local")
        from quantkit.executor.ray import import_ray, named_address

        import_ray(named_address())
