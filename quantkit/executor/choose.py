"""Makes the executor that ``--executor`` names."""

from __future__ import annotations

import torch

from quantkit.executor.base import Executor
from quantkit.executor.cluster import import_ray, named_address
from quantkit.executor.local import LocalExecutor
from quantkit.executor.ray import OPTION, RayExecutor
from quantkit.support.errors import UsageError, did_you_mean

NAMES = ("local", "ray")


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
        name: of the executor.
        device: that work is for.
        gpus: whether tasks ask for GPUs.

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
