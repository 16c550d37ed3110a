"""What each replica gets of a cluster: CPUs or a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.support.errors import QuantkitError, UsageError


@dataclass(frozen=True)
class NodeResources:
    """What a machine of a cluster has."""

    cpus: int
    gpus: int = 0

    def places(self, threads: int, gpu: bool) -> int:
        """Replicas that fit, each with ``threads`` CPUs and, if ``gpu``, with a GPU."""
        return min(self.cpus // threads, self.gpus) if gpu else self.cpus // threads


def threads_each(nodes: Sequence[NodeResources], replicas: int, *, gpu: bool = False) -> int:
    """The most threads that every replica can have.

    Args:
        nodes: the machines. A replica is on one of them.
        replicas: how many there are.
        gpu: whether each takes a GPU.

    Raises:
        QuantkitError: they don't fit, even with a thread each.
    """
    for threads in range(max((node.cpus for node in nodes), default=0), 0, -1):
        if sum(node.places(threads, gpu) for node in nodes) >= replicas:
            return threads
    total = sum(node.places(1, gpu) for node in nodes)
    needed = "GPUs with a CPU beside each" if gpu else "CPUs"
    raise QuantkitError(f"{replicas} replicas need as many {needed}, and the cluster has {total}",
                        why="each computes with a thread at least", next=f"--replicas {max(1, total)}")


def threads_now(free: Sequence[NodeResources], nodes: Sequence[NodeResources], replicas: int, *,
                gpu: bool = False) -> int:
    """The same of what is free; of all there is if that is too little, for replicas that wait.

    Args:
        free: what is free of each machine.
        nodes: the machines.
        replicas, gpu: see :func:`threads_each`.

    Raises:
        QuantkitError: they would never fit.
    """
    threads = threads_each(nodes, replicas, gpu=gpu)
    try:
        return threads_each(free, replicas, gpu=gpu)
    except QuantkitError:
        return threads


def takes_gpu(device: str, gpus: int, replicas: int) -> bool:
    """Whether each replica gets a GPU of its own.

    Args:
        device: as ``--device`` names it.
        gpus: of the cluster.
        replicas: how many there are.

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
