"""Does what a plan lacks, keeps each measurement when it is done, and says how long the rest may take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quantkit.evaluation.protocol import cpu_name
from quantkit.evaluation.sweep.jobs import Measurement, do
from quantkit.evaluation.sweep.store import MeasurementResult, MeasurementStore
from quantkit.executor.base import Executor, Task
from quantkit.support.errors import QuantkitError, Stopped
from quantkit.support.progress import Listener, ProgressEvent, silent

TIMED = ("speed", "roofline", "peer")
"""Kinds whose numbers are a machine's."""
TOLD = 1000
"""Units that progress counts, whatever measurements take."""


def run_measurements(measurements: Sequence[Measurement], store: MeasurementStore, executor: Executor,
                     progress: Listener = silent,
                     loading: Listener = silent) -> Iterator[tuple[int, MeasurementResult]]:
    """Make measurements; each is kept before the next result is waited for, and given with its number.

    Args:
        measurements: none of which was done.
        store: keeps them.
        executor: where they are done.
        progress: told of shares of the whole, weighed by the seconds that measurements may take.
        loading: told of weights that are loaded, if that is done here.

    Raises:
        QuantkitError: one failed; those before it are kept.
        Stopped: interrupted, likewise.
    """
    total = sum(measurement.seconds for measurement in measurements) or 1.0
    begun = [0.0]
    tasks: list[Task] = []
    for measurement in measurements:
        listeners = () if executor.remote else (_part(progress, measurement, begun, total), loading)
        tasks.append(Task(measurement.label, (measurement.job, *listeners), measurement.needs))
    try:
        for number, result in executor.as_completed(do, tasks):
            measurement = measurements[number]
            store.put(measurement.key, result)
            begun[0] += measurement.seconds
            progress(ProgressEvent(_share(begun[0], total), TOLD, measurement.label, unit="%"))
            if measurement.kind in TIMED and result.data.get("cpu", cpu_name()) != cpu_name():
                raise QuantkitError(f"{measurement.label}: its machine has another processor",
                                    why=f"{result.data['cpu']} there, {cpu_name()} here: speeds of different "
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
        progress(ProgressEvent(_share(done, total), TOLD, measurement.label, unit="%"))

    return listen


def _share(seconds: float, total: float) -> int:
    """Of :data:`TOLD`; all of it is all, although sums in another order differ in the last bit."""
    return min(TOLD, int(TOLD * seconds / total + 1e-6))
