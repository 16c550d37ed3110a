"""Starts replicas as actors of a Ray cluster, reaches them, replaces those that end, and ends them.

A placement group reserves each replica's CPUs or GPU, so that one that is replaced has a place.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from quantkit.executor.cluster import LOCAL, Cluster, WorkerSetup, import_ray, named_address
from quantkit.serving.replicas.forward import ReplicaLostError
from quantkit.serving.replicas.places import Places, reserve_places
from quantkit.serving.replicas.replica import (
    ForwardedRequest,
    Load,
    Replica,
    ReplicaAnswer,
    ReplicaInfo,
)
from quantkit.support.errors import QuantkitError

OPTION = "--replicas"
MAX_ONGOING = 100_000
"""Calls that a replica works on at once: its engines' queues have the limits that count."""
MESSAGE_MEMORY = 256 * 2**20
"""Bytes of shared memory for bodies on their way, in a cluster that is started here."""
LATE_SECONDS = 90.0
"""After which a replica that doesn't say that it is well is replaced."""
RETRY_SECONDS = 5.0
"""Before another replica is started where one couldn't load its models again."""
POLL = 0.2
"""Between two looks at what replicas have answered."""
STATE_SECONDS = 10.0
"""For each replica to say how it is."""


@dataclass
class _Slot:
    """One of the places on the cluster, and the replica there.

    Attributes:
        number: The index of the place, from 0.
        id: The name of the replica.
        actor: Ray's handle of the replica.
        pending: Ray's reference to what it was asked last: to load its models, or whether it is well.
        info: The replica's description, once its models are loaded.
        asked: The time at which ``pending`` was asked.
    """

    number: int
    id: str = ""
    actor: Any = None
    pending: Any = None
    info: ReplicaInfo | None = None
    asked: float = field(default_factory=time.monotonic)


class ReplicaSet:
    """Replicas that run until :meth:`close`.

    Args:
        load: The function that loads the models in each replica's process.
        replicas: The number of replicas.
        device: The value of ``--device``.
        locked: Whether clients of the server need a key.
        tell: This is told what is waited for while the replicas start.

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
        self._closed = threading.Event()
        self._answering = 0
        self._slots: list[_Slot] = []
        self._actors: dict[str, Any] = {}  # of replicas that answer
        self._places: Places | None = None
        self._supervisor = threading.Thread(target=self._supervise, name="replicas", daemon=True)
        threads = max(1, torch.get_num_threads() // replicas) if address == LOCAL else 0
        self._cluster = Cluster(self._ray, address, next=f"leave out {OPTION}", num_cpus=replicas * threads,
                                object_store_memory=MESSAGE_MEMORY)
        try:
            self._places = reserve_places(self._ray, replicas, device, threads, tell)
            self.threads = self._places.threads
            self._setup = WorkerSetup.of_this_process(self.threads)
            self._start(replicas)
        except BaseException:
            self.close()
            raise
        self._supervisor.start()

    @property
    def running(self) -> list[str]:
        """Replicas that answer, as far as is known."""
        return list(self._actors)

    async def answer(self, replica: str, request: ForwardedRequest) -> AsyncGenerator[list[Any], None]:
        """See :meth:`quantkit.serving.replicas.forward.Replicas.answer`."""
        if (actor := self._actors.get(replica)) is None:
            raise ReplicaLostError
        stream = actor.answer.options(num_returns="streaming").remote(request)
        self._answering += 1
        try:
            async for batch in stream:
                yield await batch
        except self._ray.exceptions.RayTaskError:
            raise
        except self._ray.exceptions.RayError as error:
            if isinstance(error, self._ray.exceptions.ActorDiedError):  # this may be known here first
                self._actors.pop(replica, None)
            raise ReplicaLostError(str(error)) from error
        except BaseException:  # the client has left
            if not self._closed.is_set():
                self._ray.cancel(stream)
            raise
        finally:
            self._answering -= 1

    async def get(self, path: str) -> list[ReplicaAnswer]:
        """See :meth:`quantkit.serving.replicas.forward.Replicas.get`."""

        async def ask(actor: Any) -> ReplicaAnswer:
            answer: ReplicaAnswer = await asyncio.wait_for(actor.get.remote(path), STATE_SECONDS)
            return answer

        answers = await asyncio.gather(*map(ask, list(self._actors.values())), return_exceptions=True)
        return sorted((answer for answer in answers if isinstance(answer, ReplicaAnswer)),
                      key=lambda answer: answer.id)

    def close(self) -> None:
        """End the replicas, and the cluster if it was started here."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._actors.clear()
        if self._supervisor.is_alive():
            self._supervisor.join()
        try:
            with contextlib.suppress(Exception):  # the cluster may be gone already
                for slot in self._slots:
                    self._ray.kill(slot.actor)
                if self._places is not None:
                    self._ray.util.remove_placement_group(self._places.group)
            deadline = time.monotonic() + 1
            while self._answering and time.monotonic() < deadline:  # their clients hear that they are cut
                time.sleep(0.01)
        finally:
            self._cluster.close()

    def _start(self, replicas: int) -> None:
        """Start all replicas and wait until their models are loaded, however long that takes."""
        self._slots = [_Slot(number) for number in range(replicas)]
        for slot in self._slots:
            self._replace(slot)
        while len(self.running) < replicas:
            for slot in self._heard():
                try:
                    self._hear(slot)
                except self._ray.exceptions.RayTaskError as error:
                    if isinstance(error.cause, QuantkitError):
                        raise error.cause from None
                    raise _not_started(f"{type(error.cause).__name__}: {error.cause}") from error
                except self._ray.exceptions.RayError as error:
                    raise _not_started(str(error).strip().rpartition("\n")[2]) from error
        self.infos = sorted((slot.info for slot in self._slots if slot.info), key=lambda info: info.id)

    def _supervise(self) -> None:
        """Replace replicas that end until the set is closed."""
        while not self._closed.is_set():
            try:
                for slot in self._heard():
                    self._hear_or_replace(slot)
                for slot in self._slots:
                    if slot.info is not None and time.monotonic() - slot.asked > LATE_SECONDS:
                        self._replace(slot)
            except Exception:  # the cluster doesn't answer
                self._closed.wait(RETRY_SECONDS)

    def _hear_or_replace(self, slot: _Slot) -> None:
        try:
            self._hear(slot)
        except Exception:  # it ended, or its engine did
            if slot.info is None:  # before it was ready, as the next one may
                self._closed.wait(RETRY_SECONDS)
            self._replace(slot)

    def _heard(self) -> list[_Slot]:
        """The places whose replicas have answered what they were asked, or have ended."""
        pending = [slot.pending for slot in self._slots]
        answered, _ = self._ray.wait(pending, num_returns=len(pending), timeout=POLL)
        return [slot for slot in self._slots if slot.pending in answered]

    def _hear(self, slot: _Slot) -> None:
        """Take a replica's answer and ask again. Raises RayError: it ended, or isn't well."""
        answer = self._ray.get(slot.pending)
        if isinstance(answer, ReplicaInfo):
            slot.info = answer
            self._actors[slot.id] = slot.actor
        slot.pending = slot.actor.check.remote()
        slot.asked = time.monotonic()

    def _replace(self, slot: _Slot) -> None:
        """Start another replica in a slot."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if slot.actor is not None:
            self._actors.pop(slot.id, None)
            self._ray.kill(slot.actor)
        slot.info = None
        slot.id = secrets.token_hex(4)
        assert self._places is not None
        where = PlacementGroupSchedulingStrategy(self._places.group,
                                                 placement_group_bundle_index=slot.number)
        options = {"num_cpus": self._places.threads, "num_gpus": self._places.gpus,
                   "max_concurrency": MAX_ONGOING, "scheduling_strategy": where}
        slot.actor = self._ray.remote(Replica).options(**options).remote(slot.id, self._setup, self._locked)
        slot.pending = slot.actor.load.remote(self._load)


def _not_started(reason: str) -> QuantkitError:
    return QuantkitError("a replica can't be started", why=reason[:300] or None,
                         next=f"the same command without {OPTION} shows more")
