"""Does what a plan lacks, keeps each measurement when it is done, and says how long the rest may take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from quantkit.evaluation.protocol import cpu_name
from quantkit.evaluation.sweep.jobs import Job, Measurement, Place, run_job
from quantkit.evaluation.sweep.models import LoadedModels, ModelFacts
from quantkit.evaluation.sweep.quality import QualityJob
from quantkit.evaluation.sweep.store import (
    Data,
    MeasuredData,
    MeasurementResult,
    MeasurementStore,
    user_store,
)
from quantkit.executor.base import Executor, Task
from quantkit.executor.ray import make_executor
from quantkit.quantization.planning.duration import operations
from quantkit.runtime.memory.machine import available_memory
from quantkit.support.device import find_device
from quantkit.support.errors import QuantkitError, Stopped
from quantkit.support.progress import Listener, ProgressEvent, silent
from quantkit.support.units import human_bytes

SHARE = 1.3
"""Of this machine's arithmetic in float32, what a model reaches with its own kernels, loading and scoring
included."""
UNITS = 1000
"""Units that progress counts, whatever measurements take."""


class SweepResults:
    """The results of measurements, by kind and place.

    Args:
        measurements: the measurements that were made.
        results: their results, in the same order.
    """

    def __init__(self, measurements: Sequence[Measurement],
                 results: Sequence[MeasurementResult[MeasuredData]]) -> None:
        self._results: dict[str, dict[Place, Any]] = {}
        for measurement, result in zip(measurements, results, strict=True):
            self._results.setdefault(measurement.kind, {})[measurement.place] = result

    def of(self, kind: str, data: type[Data]) -> dict[Place, MeasurementResult[Data]]:
        """All results of a kind, whose data is of this class, in the order of their places; empty if nothing
        of it was measured."""
        return dict(sorted(self._results.get(kind, {}).items()))


def store_of(keep: bool) -> MeasurementStore:
    """The user's store, or one that keeps nothing."""
    return user_store() if keep else MeasurementStore(None)


def measured(measurements: Sequence[Measurement], model: ModelFacts, *, keep: bool, fresh: bool = False,
             device: str = "auto", executor: str = "local", progress: Listener = silent,
             loading: Listener = silent, memory: int = 0, disk: int = 0,
             announce: Callable[[str], object] = lambda text: None) -> list[MeasurementResult[MeasuredData]]:
    """The results of measurements: from an earlier run where they are kept, else made now.

    Args:
        measurements: the measurements to make.
        model: the first model, by whose size the time is estimated.
        keep: whether results are kept in the user's cache folder and used again.
        fresh: whether what was kept before is measured anew.
        device, executor: where measurements are done.
        progress, loading: see :func:`run_measurements`.
        memory, disk: bytes that this takes, about.
        announce: told so in a sentence, before a weight is read.

    Raises:
        QuantkitError: a measurement failed; those before it are kept.
        Stopped: interrupted, likewise.
    """
    store = store_of(keep)
    results: dict[int, MeasurementResult[MeasuredData]] = {}
    for number, measurement in enumerate(measurements):
        kept = None if fresh else store.get(measurement.key, measurement.job.data)
        if kept is not None:
            results[number] = kept
    numbers = [number for number in range(len(measurements)) if number not in results]
    if numbers:
        if memory:
            free = available_memory()
            short = f", and {human_bytes(free)} are free" if free is not None and free < memory else ""
            announce(f"this takes about {human_bytes(memory)} of memory{short}; until it ends, "
                     f"{human_bytes(disk)} of disk")
        missing = with_seconds([measurements[number] for number in numbers], model)
        with closing(make_executor(executor, find_device(device), gpus=True)) as runs:
            for number, result in run_measurements(missing, store, runs, progress, loading):
                results[numbers[number]] = result
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return [results[number] for number in range(len(measurements))]


def with_seconds(measurements: Sequence[Measurement], model: ModelFacts) -> list[Measurement]:
    """Measurements with the seconds that they may take, from a model's size and this machine's arithmetic."""
    if not measurements:
        return []
    tok_s, read, timed = SHARE * operations() / (2 * model.parameters), set[str](), []
    for measurement in measurements:
        job: Job[MeasuredData] = measurement.job
        seconds = job.seconds(tok_s)
        if isinstance(job, QualityJob) and job.text not in read:
            seconds += job.reference_seconds(tok_s)
            read.add(job.text)
        timed.append(replace(measurement, seconds=seconds))
    return timed


def run_measurements(measurements: Sequence[Measurement], store: MeasurementStore, executor: Executor,
                     progress: Listener = silent,
                     loading: Listener = silent) -> Iterator[tuple[int, MeasurementResult[MeasuredData]]]:
    """Make measurements; each is kept before the next result is waited for, and given with its number. Those
    that are done here share the models in memory.

    Args:
        measurements: none of which was done.
        store: the store that keeps them.
        executor: the executor that does them.
        progress: told of shares of the whole, weighed by the seconds that measurements may take.
        loading: told of weights that are loaded, if that is done here.

    Raises:
        QuantkitError: one failed; those before it are kept.
        Stopped: interrupted, likewise.
    """
    total = sum(measurement.seconds for measurement in measurements) or 1.0
    begun, models = [0.0], LoadedModels()
    tasks: list[Task] = []
    for measurement in measurements:
        here = () if executor.remote else (_part(progress, measurement, begun, total), loading, models)
        tasks.append(Task(measurement.label, (measurement.job, *here), measurement.needs))
    try:
        for number, result in executor.as_completed(run_job, tasks):
            measurement = measurements[number]
            store.put(measurement.key, result)
            begun[0] += measurement.seconds
            progress(ProgressEvent(_share(begun[0], total), UNITS, measurement.label, unit="%"))
            if measurement.job.timed and result.data.cpu != cpu_name():
                raise QuantkitError(f"{measurement.label}: its machine has another processor",
                                    why=f"{result.data.cpu} there, {cpu_name()} here: speeds of different "
                                        "machines can't be compared", next="add --no-speed")
            yield number, result
    except KeyboardInterrupt:
        if not store.keeps:
            raise
        raise Stopped("stopped; what was measured is kept",
                      next="run the same command again, without --fresh, to go on") from None


def _part(progress: Listener, measurement: Measurement, begun: list[float], total: float) -> Listener:
    """A listener for the events of one measurement, as parts of the whole."""
    def listen(event: ProgressEvent) -> None:
        share = event.done / event.total if event.total else 0.0
        done = begun[0] + share * measurement.seconds
        progress(ProgressEvent(_share(done, total), UNITS, measurement.label, unit="%"))

    return listen


def _share(seconds: float, total: float) -> int:
    """Of :data:`UNITS`; all of it is all, although sums in another order differ in the last bit."""
    return min(UNITS, int(UNITS * seconds / total + 1e-6))
