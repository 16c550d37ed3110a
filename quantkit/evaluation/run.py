"""Runs one comparison: plans it, does what isn't there yet, and puts it together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

import torch

from quantkit.evaluation.keys import EXACT, PER_RUN
from quantkit.evaluation.metric_table import MetricInfo, RegisteredMetric, builtin_infos, registered_metrics
from quantkit.evaluation.result import EvalResult
from quantkit.evaluation.settings import EvalSettings
from quantkit.evaluation.sweep.assemble import assemble, by_place
from quantkit.evaluation.sweep.estimate import estimated
from quantkit.evaluation.sweep.facts import facts_of
from quantkit.evaluation.sweep.plan import make_plan, memory_bytes, planned_texts
from quantkit.evaluation.sweep.quality import forget_models
from quantkit.evaluation.sweep.run import run_measurements
from quantkit.evaluation.sweep.store import MeasurementResult, MeasurementStore, user_store
from quantkit.executor.choose import make_executor
from quantkit.memory.machine import available_memory
from quantkit.plugins.manager import current
from quantkit.support.device import find_device
from quantkit.support.errors import UsageError, did_you_mean
from quantkit.support.progress import Listener, silent
from quantkit.support.units import human_bytes


def evaluate(uris: Sequence[str], settings: EvalSettings, progress: Listener = silent,
             command: str | None = None, loading: Listener = silent, *, executor: str = "local",
             recipes: Mapping[str, str] | None = None,
             announce: Callable[[str], object] = lambda text: None) -> EvalResult:
    """Compare models, or the product of models and KV settings.

    Args:
        uris: checkpoints or sources, the reference first.
        settings: protocol.
        progress: told of every measurement, and of its parts.
        command: what was typed, for the report.
        loading: told of the weights of each model that is loaded, in MiB.
        executor: where measurements are done: ``local`` or ``ray``.
        recipes: checkpoint → the recipe that made it.
        announce: told in a sentence, before a weight is read, how much memory this takes.

    Raises:
        UsageError: models can't be compared, or a metric to plot isn't measured.
        QuantkitError: a model can't be loaded, the text is unusable, or a measurement failed. What was
            measured before is kept if the settings say so.
        Stopped: interrupted, likewise.
    """
    if not uris:
        raise UsageError("no model is given", next="quantkit eval smollm2")
    if len(set(uris)) != len(uris):
        raise UsageError("a model is given twice", next="name each model once")
    infos = _infos(settings, registered_metrics())
    texts = planned_texts(settings)
    models = [facts_of(uri, settings.revision_of(number), settings.dtype, (recipes or {}).get(uri),
                       settings.keep) for number, uri in enumerate(uris)]
    plan = make_plan(models, settings, texts)
    store = user_store() if settings.keep else MeasurementStore(None)
    results: dict[int, MeasurementResult] = {}
    for number, measurement in enumerate(plan.measurements):
        if not settings.fresh and (known := store.get(measurement.key)) is not None:
            results[number] = known
    numbers = [number for number in range(len(plan.measurements)) if number not in results]
    missing = estimated(plan, [plan.measurements[number] for number in numbers])
    forget_models()  # of another comparison: a folder may hold another model since
    if missing:
        needed, free = memory_bytes(models, settings), available_memory()
        short = f", and {human_bytes(free)} are free" if free is not None and free < needed else ""
        announce(f"this takes about {human_bytes(needed)} of memory{short}")
        try:
            with closing(make_executor(executor, find_device(settings.device), gpus=True)) as runs:
                for number, measured in run_measurements(missing, store, runs, progress, loading):
                    results[numbers[number]] = measured
        finally:
            forget_models()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    result = assemble(plan, settings, by_place(results, plan.measurements))
    result.metrics, result.command = infos, command
    result.plotted = settings.plot or result.plotted
    current().notify("on_run_finished", kind="eval", summary=result.to_dict())
    return result


def check_plot(settings: EvalSettings) -> None:
    """Raises UsageError: a metric to plot won't be measured."""
    _infos(settings, registered_metrics())


def _infos(settings: EvalSettings, metrics: Sequence[RegisteredMetric]) -> dict[str, MetricInfo]:
    """What can be measured, in a report's order. Raises UsageError if that lacks a metric to plot."""
    infos = builtin_infos() | {registered.metric.name: registered.info() for registered in metrics
                               if not registered.builtin}
    measured = [key for key, info in infos.items() if (settings.speed or info.per != PER_RUN)
                and (settings.noise_floor or key != EXACT)]
    for key in settings.plot:
        # a task's scores are known when it has run
        if key not in measured and not (settings.tasks and "/" in key):
            if key == EXACT:
                raise UsageError(f"--plot {key}: it is measured with --noise-floor only",
                                 next="add --noise-floor")
            if key in infos:
                raise UsageError(f"--plot {key}: speed isn't measured", next="leave out --no-speed")
            raise UsageError(f"--plot {key[:80]}: there is no such metric", why=did_you_mean(key, measured),
                             next="--plot " + ",".join(measured[:2]))
    return infos


__all__ = ["EvalSettings", "check_plot", "evaluate"]
