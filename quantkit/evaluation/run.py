"""Runs one comparison: plans it, does what isn't there yet, and puts it together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from quantkit.evaluation.keys import EXACT, PER_RUN, WORD_PERPLEXITY
from quantkit.evaluation.metric_table import MetricInfo, RegisteredMetric, builtin_infos, registered_metrics
from quantkit.evaluation.metrics import PERPLEXITY
from quantkit.evaluation.result import EvalResult
from quantkit.evaluation.settings import EvalSettings
from quantkit.evaluation.sweep.assemble import assemble
from quantkit.evaluation.sweep.models import facts_of
from quantkit.evaluation.sweep.plan import disk_bytes, make_plan, measurable, memory_bytes, planned_texts
from quantkit.evaluation.sweep.run import SweepResults, measured
from quantkit.plugins.manager import current
from quantkit.support.errors import UsageError, did_you_mean
from quantkit.support.progress import Listener, silent


def evaluate(uris: Sequence[str], settings: EvalSettings, progress: Listener = silent,
             command: str | None = None, loading: Listener = silent, *, executor: str = "local",
             recipes: Mapping[str, str] | None = None,
             announce: Callable[[str], object] = lambda text: None) -> EvalResult:
    """Compare models, or the product of models and KV settings.

    Args:
        uris: checkpoints or sources, the reference first.
        settings: the choices of the caller.
        progress: told of every measurement, and of its parts.
        command: the command line, for the report.
        loading: told of the weights of each model that is loaded, in MiB.
        executor: the place of measurements: ``local`` or ``ray``.
        recipes: checkpoint → the recipe that made it.
        announce: told in a sentence, before a weight is read, how much memory and disk this takes.

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
    _infos(settings, registered_metrics())
    texts = planned_texts(settings)
    models = [facts_of(uri, settings.revision_of(number), settings.dtype, (recipes or {}).get(uri),
                       settings.keep) for number, uri in enumerate(uris)]
    settings = measurable(models, settings, announce)
    infos = _infos(settings, registered_metrics())
    if models[0].config.diffusion is not None:
        for key, title in ((PERPLEXITY.name, "perplexity bound"), (WORD_PERPLEXITY, "its bound a word")):
            infos[key] = replace(infos[key], title=title)
    plan = make_plan(models, settings, texts)
    results = measured(plan.measurements, models[0], keep=settings.keep, fresh=settings.fresh,
                       device=settings.device, executor=executor, progress=progress, loading=loading,
                       memory=memory_bytes(models, settings), disk=disk_bytes(models[0], texts, settings),
                       announce=announce)
    result = assemble(plan, settings, SweepResults(plan.measurements, results))
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
