"""Makes the executor that ``--executor`` names."""

from __future__ import annotations

import torch

from quantkit.errors import UsageError, did_you_mean
from quantkit.executor.base import Executor
from quantkit.executor.cluster import import_ray, named_address
from quantkit.executor.local import LocalExecutor
from quantkit.executor.ray import OPTION, RayExecutor

NAMES = ("local", "ray")


def make_executor(name: str, device: torch.device) -> Executor:
    """``local`` or ``ray``, for work on ``device``. Raises what :func:`check_executor` does,
    and QuantkitError if it can't be started."""
    check_executor(name, device)
    if name == "local":
        return LocalExecutor()
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
        import_ray(named_address(), OPTION)
