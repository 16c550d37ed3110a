"""What replicas get of a cluster: each as many CPUs of one machine, and a GPU if the device is one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.support.errors import QuantkitError, UsageError

PLACE_SECONDS, TRY_SECONDS = 300.0, 1.0
"""For places on the cluster to become free, and for the cluster to say whether some are free now."""
POLL = 0.2


@dataclass(frozen=True)
class Places:
    """A place for each replica, reserved on the cluster.

    Attributes:
        group: Ray's placement group, with a bundle for each replica.
        threads: CPUs of each.
        gpus: GPUs of each, 1 or 0.
    """

    group: Any
    threads: int
    gpus: int


def reserve_places(ray: Any, replicas: int, device: str, threads: int, tell: Callable[[str], None]) -> Places:
    """Reserve a place for each replica, and wait for that if others use the cluster.

    Args:
        ray: The package, connected to the cluster.
        replicas: The number of replicas.
        device: The value of ``--device``.
        threads: The threads of each replica. 0 takes the most for which there is room now, or would be if
            nobody else used the cluster.
        tell: This is told what is waited for.

    Raises:
        QuantkitError: they don't fit, or found no place in time.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = int(takes_gpu(device, int(sum(node.get("GPU", 0) for node in nodes)), replicas))
    wanted = threads or threads_each(nodes, replicas, gpu=bool(gpus))
    threads = min(wanted, int(ray.available_resources().get("CPU", 0)) // replicas)
    while threads:  # what is free may be in parts on several machines
        if (group := _reserved(ray, replicas, threads, gpus, TRY_SECONDS)) is not None:
            return Places(group, threads, gpus)
        threads //= 2
    needs = f"{wanted} CPU{'s' if wanted > 1 else ''}{' and a GPU' if gpus else ''}"
    tell(f"waiting for {needs} for each replica: the cluster has no place for some of them")
    if (group := _reserved(ray, replicas, wanted, gpus, PLACE_SECONDS)) is not None:
        return Places(group, wanted, gpus)
    raise QuantkitError(f"some replicas found no place within {PLACE_SECONDS / 60:g} minutes",
                        why=f"each needs {needs}, and others use the cluster",
                        next="ray status\nor fewer --replicas")


def _reserved(ray: Any, replicas: int, threads: int, gpus: int, seconds: float) -> Any:
    """A placement group, if there is room for it within that time."""
    bundle = {"CPU": threads, "GPU": gpus} if gpus else {"CPU": threads}
    group = ray.util.placement_group([bundle] * replicas)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if group.wait(POLL):
            return group
    ray.util.remove_placement_group(group)
    return None


def threads_each(nodes: Sequence[Mapping[str, float]], replicas: int, *, gpu: bool = False) -> int:
    """The most threads that every replica can have.

    Args:
        nodes: The ``CPU`` and ``GPU`` of each machine. A replica is on one of them.
        replicas: The number of replicas.
        gpu: Whether each takes a GPU.

    Raises:
        QuantkitError: they don't fit, even with a thread each.
    """
    def places(threads: int) -> int:
        return sum(int(min(node.get("CPU", 0) // threads, node.get("GPU", 0) if gpu else replicas))
                   for node in nodes)

    for threads in range(int(max((node.get("CPU", 0) for node in nodes), default=0)), 0, -1):
        if places(threads) >= replicas:
            return threads
    needed = "GPUs with a CPU beside each" if gpu else "CPUs"
    raise QuantkitError(f"{replicas} replicas need as many {needed}, and the cluster has {places(1)}",
                        why="each computes with a thread at least", next=f"--replicas {max(1, places(1))}")


def takes_gpu(device: str, gpus: int, replicas: int) -> bool:
    """Whether each replica gets a GPU of its own.

    Args:
        device: The value of ``--device``.
        gpus: The number of GPUs in the cluster.
        replicas: The number of replicas.

    Raises:
        UsageError: the device is a certain GPU, or there are fewer GPUs than replicas.
    """
    if ":" in device:
        raise UsageError(f"--device {device} doesn't go with --replicas",
                         why="each replica has a GPU of its own, which Ray chooses", next="--device cuda")
    if device == "cpu" or (device == "auto" and not gpus):
        return False
    if gpus < replicas:
        raise UsageError(f"{replicas} replicas need as many GPUs, and the cluster has {gpus}",
                         why="each has a GPU of its own",
                         next=f"--replicas {gpus}\nor --device cpu" if gpus else "--device cpu")
    return True
