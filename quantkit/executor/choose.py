"""The executors that ``--executor`` names: this process, or a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeVar

import torch

from quantkit.executor.base import Executor, Item, Task
from quantkit.executor.cluster import import_ray, named_address
from quantkit.executor.ray import OPTION, RayExecutor
from quantkit.support.errors import UsageError, did_you_mean

T = TypeVar("T")
NAMES = ("local", "ray")


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
        for number, task in enumerate(tasks):
            yield number, work(*task.arguments)

    def close(self) -> None:
        """Nothing was started."""


def make_executor(name: str, device: torch.device, *, gpus: bool = False) -> Executor:
    """``local`` or ``ray``, for work on ``device``; ``gpus``: whether tasks ask for GPUs.

    Raises:
        UsageError, QuantkitError: as :func:`check_executor`; or it can't be started.
    """
    check_executor(name, device, gpus=gpus)
    if name == "local":
        return LocalExecutor()
    return RayExecutor()


def check_executor(name: str, device: torch.device, *, gpus: bool = False) -> None:
    """Check before any work.

    Args:
        name: The name of the executor.
        device: The device that the work is for.
        gpus: Whether tasks ask for GPUs.

    Raises:
        UsageError: there is no such executor, or it can't use a GPU.
        QuantkitError: a package is missing.
    """
    if name not in NAMES:
        raise UsageError(f"no executor is called {name!r}", why=did_you_mean(name, NAMES),
                         next="--executor local")
    if name == "ray":
        if device.type != "cpu" and not gpus:
            raise UsageError(f"--executor ray doesn't go with --device {device.type}",
                             why="workers of a cluster compute on their CPUs", next="--executor local")
        import_ray(named_address(), OPTION)
