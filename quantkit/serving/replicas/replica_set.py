"""Starts replicas on a cluster by Ray Serve, reaches them and ends them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import sys
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import Any

import torch

from quantkit.executor.cluster import LOCAL, carried_environment, connect, import_ray, named_address
from quantkit.serving.replicas import router
from quantkit.serving.replicas.base import ForwardedRequest, ReplicaAnswer, ReplicaInfo, ReplicaLostError
from quantkit.serving.replicas.collect import collect
from quantkit.serving.replicas.interrupt import interrupt_put_off
from quantkit.serving.replicas.replica import Load, Replica, ReplicaSetup
from quantkit.serving.replicas.resources import NodeResources, takes_gpu, threads_now
from quantkit.serving.replicas.starting import wait_until_running
from quantkit.support.errors import QuantkitError

OPTION = "--replicas"
MAX_ONGOING = 100_000
"""Requests that Ray Serve gives a replica at once: the replica's own queue has the limits that count."""
MESSAGE_MEMORY = 256 * 2**20
"""Bytes of shared memory for bodies on their way, in a cluster that is started here."""
CHECK_SECONDS = 2.0
"""Between two looks at whether a replica lives."""
STATE_SECONDS = 10.0
"""For each replica to say how it is."""


class ReplicaSet:
    """Replicas that run until :meth:`close`.

    Args:
        load: loads the models in each replica's process.
        replicas: how many.
        device: as ``--device`` names it.
        slack: requests that a replica may have more than the least busy one and still get another.
        locked: whether clients of the server need a key.
        tell: is told what is waited for while the replicas start.

    Attributes:
        infos: of the replicas as they were started; one that is lost is replaced by another.
        threads: of each.

    Raises:
        QuantkitError: Ray isn't installed, the cluster can't be used, or a replica can't load its models.
    """

    def __init__(self, load: Load, replicas: int, *, device: str = "auto", slack: int = 8,
                 locked: bool = False, tell: Callable[[str], None]) -> None:
        address = named_address()
        self._ray = import_ray(address, OPTION)
        self._serve = _import_serve()
        self._local = address == LOCAL
        # a cluster has servers of several machines and containers, whose process ids may be the same
        self._name, self._closed = f"quantkit-{os.getpid()}-{secrets.token_hex(4)}", False
        threads = max(1, torch.get_num_threads() // replicas) if self._local else 0
        try:
            with interrupt_put_off() as check:
                connect(self._ray, address, next=f"leave out {OPTION}", num_cpus=replicas * threads,
                        object_store_memory=MESSAGE_MEMORY)
                check()
                gpu = takes_gpu(device, int(self._ray.cluster_resources().get("GPU", 0)), replicas)
                self.threads = threads or threads_now(*self._resources(), replicas, gpu=gpu)
                setup = ReplicaSetup(self.threads, carried_environment(), list(sys.path), self._local, locked)
                self._start(load, setup, replicas, gpu, slack, tell, check)
        except BaseException:
            self.close()
            raise

    def answer(self, request: ForwardedRequest) -> AsyncGenerator[list[Any], None]:
        """See :meth:`quantkit.serving.replicas.base.Replicas.answer`."""
        return self._answer(request)

    async def get(self, path: str) -> list[ReplicaAnswer]:
        """See :meth:`quantkit.serving.replicas.base.Replicas.get`."""
        if self._closed:
            return []
        # ``results_async`` has one time limit for all, after which it forgets what was answered
        response = self._handle.broadcast("get", path)
        try:
            async with asyncio.timeout(STATE_SECONDS):
                results = await response._fetch_replica_results_async()
        except (self._serve.exceptions.RayServeException, TimeoutError):
            return []  # no replica runs
        answers = await collect((result.get_async() for result in results), STATE_SECONDS)
        return sorted(answers, key=lambda answer: answer.id)

    async def any_runs(self) -> bool:
        """See :meth:`quantkit.serving.replicas.base.Replicas.any_runs`."""
        if self._closed:
            return False
        try:
            await self._handle.broadcast("info").results_async(timeout_s=STATE_SECONDS)
        except self._serve.exceptions.RayServeException:
            return False
        except (self._ray.exceptions.RayError, TimeoutError):
            pass  # one does, busy or about to end
        return True

    def close(self) -> None:
        """End the replicas, and the cluster if it was started here."""
        if self._closed:
            return
        self._closed = True
        try:
            if not self._local:
                with contextlib.suppress(Exception):  # the cluster may be gone already
                    self._serve.delete(self._name)
        finally:
            self._ray.shutdown()

    async def _answer(self, request: ForwardedRequest) -> AsyncGenerator[list[Any], None]:
        if self._closed:
            raise ReplicaLostError
        errors = self._ray.exceptions
        stream = self._handle.options(stream=True).answer.remote(request, blocks=request.blocks)
        ended = False
        try:
            async for batch in stream:
                yield batch
            ended = True
        except errors.RayTaskError:
            ended = True
            raise
        except (errors.RayError, self._serve.exceptions.RayServeException) as error:
            ended = True
            raise ReplicaLostError(str(error)) from error
        finally:
            if not ended and not self._closed:
                stream.cancel()

    def _start(self, load: Load, setup: ReplicaSetup, replicas: int, gpu: bool, slack: int,
               tell: Callable[[str], None], check: Callable[[], None]) -> None:
        from ray.serve.config import RequestRouterConfig

        quiet = {"log_level": "ERROR", "enable_access_log": False}
        self._serve.start(proxy_location="Disabled", logging_config=quiet)
        deployment = self._serve.deployment(
            Replica, name="Replica", num_replicas=replicas, max_ongoing_requests=MAX_ONGOING,
            ray_actor_options={"num_cpus": setup.threads, "num_gpus": int(gpu)},
            request_router_config=RequestRouterConfig.model_validate(
                {"request_router_class": router.PATH, "request_router_kwargs": {"slack": slack}}),
            health_check_period_s=CHECK_SECONDS, graceful_shutdown_wait_loop_s=0.1,
            graceful_shutdown_timeout_s=5, max_constructor_retry_count=1, logging_config=quiet)
        target = self._serve.RunTarget(deployment.bind(load, setup), self._name, None, quiet)
        (self._handle,) = self._serve.run_many([target], wait_for_applications_running=False)
        cpus = f"{setup.threads} CPU{'s' if setup.threads > 1 else ''}"
        wait_until_running(lambda: self._serve.status().applications[self._name],
                           f"{cpus} and a GPU" if gpu else cpus, OPTION, tell, check)
        infos: list[ReplicaInfo] = self._handle.broadcast("info").results(timeout_s=STATE_SECONDS)
        self.infos = sorted(infos, key=lambda info: info.id)

    def _resources(self) -> tuple[list[NodeResources], list[NodeResources]]:
        """What is free of each machine, and what it has."""
        from ray._private.state import available_resources_per_node

        def amounts(resources: Iterable[Mapping[str, float]]) -> list[NodeResources]:
            return [NodeResources(int(each.get("CPU", 0)), int(each.get("GPU", 0))) for each in resources]

        return (amounts(available_resources_per_node().values()),
                amounts(node["Resources"] for node in self._ray.nodes() if node["Alive"]))


def _import_serve() -> Any:
    """Ray Serve, which has dependencies of its own."""
    try:
        from ray import serve
    except ImportError as error:
        raise QuantkitError(f"{OPTION} needs Ray Serve", why=str(error),
                            next='pip install "ray[serve]"') from error
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    return serve
