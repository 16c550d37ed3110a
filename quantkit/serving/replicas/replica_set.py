"""Starts replicas as actors of a Ray cluster, reaches them, replaces those that end, and ends them.

A placement group reserves each replica's place: as many CPUs of one machine, and a GPU if the device is one.
So one that is replaced has a place.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from typing import Any

import torch

from quantkit.executor.cluster import LOCAL, Cluster, WorkerSetup, import_ray, named_address
from quantkit.serving.replicas.replica import ForwardedRequest, Load, Replica, ReplicaInfo
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
    limit = threads or threads_each(nodes, replicas, gpu=bool(gpus))
    threads = min(limit, int(ray.available_resources().get("CPU", 0)) // replicas)
    while threads:  # what is free may be in parts on several machines
        if (group := _reserved(ray, replicas, threads, gpus, TRY_SECONDS)) is not None:
            return Places(group, threads, gpus)
        threads //= 2
    needs = f"{limit} CPU{'s' if limit > 1 else ''}{' and a GPU' if gpus else ''}"
    tell(f"waiting for {needs} for each replica: the cluster has no place for some of them")
    if (group := _reserved(ray, replicas, limit, gpus, PLACE_SECONDS)) is not None:
        return Places(group, limit, gpus)
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


OPTION = "--replicas"
MAX_ONGOING = 100_000
"""Calls that a replica works on at once: its engines' queues have the limits that count."""
MESSAGE_MEMORY = 256 * 2**20
"""Bytes of shared memory for bodies on their way, in a cluster that is started here."""
LATE_SECONDS = 90.0
"""The time after which a replica that doesn't say that it is well is replaced."""
RETRY_SECONDS = 5.0
"""The time until another replica is started where one couldn't load its models again."""


class ReplicaLostError(Exception):
    """The replica that was answering is gone: its process or its machine ended."""


class ReplicaSet:
    """Replicas that run until :meth:`close`. A thread for each of the places keeps one there.

    Args:
        load: The function that loads the models in each replica's process.
        replicas: The number of replicas.
        device: The value of ``--device``.
        locked: Whether clients of the server need a key.
        tell: This is told what is waited for while the replicas start, and why one is replaced.

    Attributes:
        infos: The replicas as they were started. One that is lost is replaced by another.
        threads: The threads that each replica computes with.

    Raises:
        QuantkitError: Ray isn't installed, the cluster can't be used, or a replica can't load its models.
    """

    def __init__(self, load: Load, replicas: int, *, device: str = "auto", locked: bool = False,
                 tell: Callable[[str], None]) -> None:
        address = named_address()
        self._ray = import_ray(address, OPTION)
        self._load = load
        self._locked = locked
        self._tell = tell
        self._closed = threading.Event()
        self._answering = 0
        self._started: dict[int, Any] = {}  # the actor in each place
        self._ready: dict[str, Any] = {}  # the actors that answer, by their names
        self._keepers: list[threading.Thread] = []
        self._places: Places | None = None
        threads = max(1, torch.get_num_threads() // replicas) if address == LOCAL else 0
        self._cluster = Cluster(self._ray, address, next=f"leave out {OPTION}", num_cpus=replicas * threads,
                                object_store_memory=MESSAGE_MEMORY)
        try:
            self._places = reserve_places(self._ray, replicas, device, threads, tell)
            self.threads = self._places.threads
            self._setup = WorkerSetup.of_this_process(self.threads)
            self.infos = self._start(replicas)
        except BaseException:
            self.close()
            raise

    @property
    def running(self) -> list[str]:
        """The names of the replicas that answer, as far as is known."""
        return list(self._ready)

    async def answer(self, replica: str, request: ForwardedRequest) -> AsyncGenerator[list[Any], None]:
        """ASGI messages of a replica's answer, as many at a time as there are. Closing the generator cancels
        the request.

        Raises:
            ReplicaLostError: the replica ended before its answer did, or its engine had ended.
        """
        if (actor := self._ready.get(replica)) is None:
            raise ReplicaLostError
        stream = actor.answer.options(num_returns="streaming").remote(request)
        self._answering += 1
        try:
            async for batch in stream:
                yield await batch
        except self._ray.exceptions.RayError as error:
            if isinstance(error, self._ray.exceptions.RayTaskError) and not isinstance(error.cause,
                                                                                       QuantkitError):
                raise
            if isinstance(error, (self._ray.exceptions.ActorDiedError, self._ray.exceptions.RayTaskError)):
                self._ready.pop(replica, None)  # this may be known here first
            raise ReplicaLostError(str(error)) from error
        except BaseException:  # the client has left
            if not self._closed.is_set():
                self._ray.cancel(stream)
            raise
        finally:
            self._answering -= 1

    def close(self) -> None:
        """End the replicas, and the cluster if it was started here."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._ready.clear()
        try:
            with contextlib.suppress(Exception):  # the cluster may be gone already
                while keepers := [thread for thread in self._keepers if thread.is_alive()]:
                    for actor in list(self._started.values()):  # which ends what a thread waits for
                        self._ray.kill(actor)
                    keepers[0].join(0.1)
                if self._places is not None:
                    self._ray.util.remove_placement_group(self._places.group)
            deadline = time.monotonic() + 1
            while self._answering and time.monotonic() < deadline:  # their clients hear that they are cut
                time.sleep(0.01)
        finally:
            self._cluster.close()

    def _start(self, replicas: int) -> list[ReplicaInfo]:
        """Start all replicas and wait until their models are loaded, however long that takes."""
        started: list[Future[ReplicaInfo]] = [Future() for _ in range(replicas)]
        for place, future in enumerate(started):
            self._keepers.append(threading.Thread(target=self._keep, args=(place, future), name="replica",
                                                  daemon=True))
            self._keepers[-1].start()
        try:
            return sorted((future.result() for future in as_completed(started)), key=lambda info: info.id)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, QuantkitError):
                raise error.cause from None
            raise _not_started(f"{type(error.cause).__name__}: {error.cause}") from error
        except self._ray.exceptions.RayError as error:
            raise _not_started(str(error).strip().rpartition("\n")[2]) from error

    def _keep(self, place: int, started: Future[ReplicaInfo]) -> None:
        """Keep a replica in a place until the set is closed. If the first one can't start, there is none."""
        while not self._closed.is_set():
            name, ready = secrets.token_hex(4), False
            try:
                actor = self._started[place] = self._actor(place, name)
                info = self._ray.get(actor.load.remote(self._load))
                self._ready[name], ready = actor, True
                if not started.done():
                    started.set_result(info)
                while not self._closed.is_set():
                    self._ray.get(actor.check.remote(), timeout=LATE_SECONDS)
            except Exception as error:  # the replica has ended, or its engine, or the cluster doesn't answer
                if not started.done():
                    started.set_exception(error)
                    return
                cause = getattr(error, "cause", None)
                if isinstance(cause, QuantkitError) and not self._closed.is_set():
                    self._tell(f"replica {name} is replaced: {cause.what}: {cause.why}")
                self._ready.pop(name, None)
                if not ready:  # as the next one may not be, either
                    self._closed.wait(RETRY_SECONDS)
                with contextlib.suppress(Exception):
                    self._ray.kill(self._started[place])

    def _actor(self, place: int, name: str) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        assert self._places is not None
        where = PlacementGroupSchedulingStrategy(self._places.group, placement_group_bundle_index=place)
        options = {"num_cpus": self._places.threads, "num_gpus": self._places.gpus,
                   "max_concurrency": MAX_ONGOING, "scheduling_strategy": where}
        return self._ray.remote(Replica).options(**options).remote(name, self._setup, self._locked)


def _not_started(reason: str) -> QuantkitError:
    return QuantkitError("a replica can't be started", why=reason[:300] or None,
                         next=f"the same command without {OPTION} shows more")
