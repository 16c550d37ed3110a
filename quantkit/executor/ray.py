"""The executors that ``--executor`` names: this process, or a Ray cluster, which is one that is named or this
machine's cores.

On a cluster every piece asks for as many CPUs as torch has threads here and computes with as many, so that
sums are made in the same order as here and the bits are the same. Ray moves arguments and results with pickle
between the cluster's own processes; no file is ever read so.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from quantkit.executor.base import Executor, Item, Task
from quantkit.executor.cluster import Cluster, WorkerSetup, import_ray, named_address
from quantkit.plugins.blame import plugin_failure
from quantkit.support.errors import QuantkitError, UsageError, did_you_mean

T = TypeVar("T")
NAMES = ("local", "ray")
OPTION = "--executor ray"
LOST = 3
"""How often a task is done again whose worker was lost."""


class RayExecutor(Executor):
    """A connection to a cluster, for one run.

    Args:
        address: The address of a cluster; by default ``RAY_ADDRESS``, else one is started here.
        workers: The pieces at a time in a cluster that is started here; by default as many as have cores.

    Raises:
        QuantkitError: Ray isn't installed, or the cluster can't be reached or started.
    """

    remote = True

    def __init__(self, address: str | None = None, workers: int | None = None) -> None:
        address = address or named_address()
        self._ray = import_ray(address, OPTION)
        self._threads = torch.get_num_threads()
        self._cluster = None if self._ray.is_initialized() else Cluster(
            self._ray, address, next="--executor local", num_cpus=workers and workers * self._threads)
        _register_tensors()
        self._function = self._ray.remote(_call)
        self._call = self._function.options(num_cpus=self._threads, max_retries=1)
        self._setup = WorkerSetup.of_this_process(self._threads)

    def put(self, value: T) -> T:
        """A reference to a value, which is sent to workers once."""
        return self._ray.put(value)

    def map(self, work: Callable[..., T], items: Iterable[Item]) -> Generator[T, None, None]:
        """See :meth:`Executor.map`. Pieces that weren't waited for are cancelled."""
        running: deque[tuple[str, Any]] = deque()
        self._check_threads()
        limit = int(self._ray.cluster_resources().get("CPU", 1)) // self._threads
        try:
            for label, arguments in items:
                if len(running) >= limit:
                    yield self._result(*running.popleft())
                running.append((label, self._call.remote(self._setup, work, *arguments)))
                del arguments
            while running:
                yield self._result(*running.popleft())
        finally:
            for _, piece in running:
                self._ray.cancel(piece, force=True)

    def as_completed(self, work: Callable[..., T], tasks: Sequence[Task]) -> Generator[tuple[int, T], None,
                                                                                       None]:
        """See :meth:`Executor.as_completed`. The cluster decides where and in which order; what is timed has
        a machine with the most CPUs to itself."""
        self._check_threads()
        running = {self._begin(work, task): number for number, task in enumerate(tasks)}
        try:
            while running:
                (piece, *_), _ = self._ray.wait(list(running), num_returns=1)
                number = running.pop(piece)
                yield number, self._result(tasks[number].label, piece)
        finally:
            for piece in running:
                self._ray.cancel(piece, force=True)

    def _begin(self, work: Callable[..., T], task: Task) -> Any:
        needs = task.needs
        machines = [node["Resources"] for node in self._ray.nodes() if node["Alive"]
                    and node["Resources"].get("GPU", 0) >= needs.gpus
                    and node["Resources"].get("CPU", 0) >= self._threads]
        if not machines:
            raise QuantkitError(f"{task.label} fits no machine of the cluster", next="--executor local",
                                why=f"it takes {needs.gpus} GPUs and {self._threads} CPUs of one")
        cpus = max(int(machine["CPU"]) for machine in machines) if needs.alone else self._threads
        options: dict[str, Any] = {"num_cpus": cpus, "num_gpus": needs.gpus, "max_retries": LOST}
        if needs.memory:  # an estimate: at most all that a machine has, or it would wait forever
            largest_memory = max(int(machine.get("memory", 0)) for machine in machines)
            options["memory"] = min(needs.memory, largest_memory)
        return self._function.options(**options).remote(self._setup, work, *task.arguments)

    def _check_threads(self) -> None:
        """Raises QuantkitError: torch has more threads here than the largest worker has CPUs."""
        largest = max((int(node["Resources"].get("CPU", 0)) for node in self._ray.nodes() if node["Alive"]),
                      default=int(self._ray.cluster_resources().get("CPU", 1)))
        if largest < self._threads:
            raise QuantkitError(f"no worker of the cluster has {self._threads} CPUs",
                                why="each computes with as many threads as torch has here",
                                next=f"OMP_NUM_THREADS={max(1, largest)} quantkit … --executor ray")

    def close(self) -> None:
        """Leave the cluster; end it if it was started here."""
        if self._cluster is not None:
            self._cluster.close()

    def _result(self, label: str, piece: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(piece)
        except errors.RayTaskError as error:
            if isinstance(error.cause, QuantkitError):
                raise error.cause from None
            why = f"{type(error.cause).__name__}: {error.cause}"
            raise QuantkitError(f"{label} failed on a worker", why=why[:300],
                                next="try --executor local, which shows more") from error
        except errors.RayError as error:
            raise QuantkitError(f"{label}: its worker ended", why=str(error).strip()[:300],
                                next="run the same command again: it resumes; if memory ran out, "
                                     "with more OMP_NUM_THREADS, which makes fewer workers") from error


def make_executor(name: str, device: torch.device, *, gpus: bool = False) -> Executor:
    """``local`` or ``ray``, for work on ``device``; ``gpus``: whether tasks ask for GPUs.

    Raises:
        UsageError, QuantkitError: :func:`check_executor` raised it, or the executor can't be started.
    """
    check_executor(name, device, gpus=gpus)
    if name == "local":
        return Executor()
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


def _call(setup: WorkerSetup, work: Callable[..., T], *arguments: Any) -> T:
    """Runs in a worker: set it up like the driver, then do a piece of the work."""
    setup.apply()
    _register_tensors()
    try:
        return work(*arguments)
    except Exception as error:  # its traceback stays here
        if (failure := plugin_failure(error)) is None:
            raise
        raise failure from error


def _register_tensors() -> None:
    """Tensors of a CPU travel as their bytes and arrive as views of the cluster's memory, read-only."""
    import ray.util

    ray.util.register_serializer(torch.Tensor, serializer=_bytes_of, deserializer=_tensor_of)


class _TensorBytes(NamedTuple):
    data: Any
    dtype: torch.dtype
    shape: tuple[int, ...]


def _bytes_of(tensor: torch.Tensor) -> _TensorBytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return _TensorBytes(flat.view(torch.uint8).numpy(), flat.dtype, tuple(tensor.shape))


def _tensor_of(stored: _TensorBytes) -> torch.Tensor:
    if not stored.data.size:
        return torch.empty(stored.shape, dtype=stored.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(stored.data, dtype=stored.dtype).view(stored.shape)
