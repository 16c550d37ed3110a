"""What each replica gets of a cluster: CPUs or a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.errors import QuantkitError, UsageError


def threads_each(cpus: Sequence[int], replicas: int) -> int:
    """The most threads that every replica can have.

    Args:
        cpus: of each machine. A replica is on one of them.
        replicas: how many there are.

    Raises:
        QuantkitError: there are fewer CPUs than replicas.
    """
    for threads in range(max(cpus, default=0), 0, -1):
        if sum(number // threads for number in cpus) >= replicas:
            return threads
    raise QuantkitError(f"{replicas} replicas need as many CPUs, and the cluster has {sum(cpus)}",
                        why="each computes with a thread at least", next=f"--replicas {max(1, sum(cpus))}")


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
