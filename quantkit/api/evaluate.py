"""Measures what a method costs, and compares two results."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.api.progress import Progress, reported
from quantkit.evaluation.compare import Comparison, compare_results
from quantkit.evaluation.report.base import withheld
from quantkit.evaluation.report.folder import check_writable, write_report
from quantkit.evaluation.result import EvalResult
from quantkit.evaluation.results_file import read_results
from quantkit.evaluation.run import evaluate as measure
from quantkit.evaluation.settings import EvalSettings, of_suite
from quantkit.evaluation.suite import load_suite
from quantkit.kv.build import check_kv
from quantkit.kv.spec import KVSpec, parse_kv, split_settings
from quantkit.support.errors import UsageError, did_you_mean


def evaluate(models: str | Sequence[str], *, suite: str | None = None, kv: str | Sequence[str | KVSpec] = (),
             text: str | None = None, windows: int | None = None, speed: bool = True,
             out: str | Path | None = None, executor: str = "local", progress: Progress = True,
             **settings: Any) -> EvalResult:
    """Compare models, or the product of models and KV settings, by quality, speed and memory.

    Args:
        models: checkpoints or sources. The first with the first KV setting is the reference.
        suite: what is measured: ``quick``, ``standard``, ``long``, or a YAML file; what is given besides
            overrides it. Its tasks are left out without ``task_data``.
        kv: settings that every model runs with; by default each with its own.
        text: a file of UTF-8 text, ``builtin``, or ``hf://datasets/OWNER/NAME/FILE@REVISION``.
        windows: windows of that text.
        speed: whether prefill and decoding are timed.
        out: a folder for report, figures and results; what is measured is kept then, and used again.
        executor: where measurements are made: ``local`` or ``ray``.
        progress: whether a bar is shown, or a callback.
        settings: others of :class:`~quantkit.evaluation.settings.EvalSettings`: ``window`` (tokens),
            ``prompt`` (tokens of a window that go through the cache unscored), ``texts``, ``noise_floor``,
            ``floor``, ``tasks``, ``task_data``, ``limit`` (items a task), ``prefill``, ``decode``,
            ``repeats``, ``batches``, ``contexts``, ``roofline``, ``sensitivity``, ``peers``, ``revision``,
            ``device``, ``dtype``, ``fresh``.

    Returns:
        A row a variant, with 95% intervals. ``print`` shows it as the command does, a notebook as a table;
        ``to_pandas()`` gives a frame.

    Warns:
        UserWarning: the machine was too busy for speeds, which are left out; ``row.speed.withheld`` has why.

    Raises:
        UsageError: a setting is unknown or out of range, or models can't be compared.
        QuantkitError: a model can't be loaded, the text is unusable, or a measurement failed.
        Stopped: interrupted; with ``out`` what was measured is kept.

    >>> result = quantkit.evaluate(["smollm2", "smollm2-int8"], windows=2, speed=False, progress=False)
    >>> result.rows[1].metrics["kl_mean"].value < 0.01
    True
    """
    if out is not None:
        check_writable(Path(out))
    for name in ("keep", "plot", "suite"):
        if name in settings:
            raise UsageError(f"{name!r} is no setting of evaluate", next="help(quantkit.evaluate) lists them")
    chosen = chosen_settings(suite, {"text": text, "windows": windows, **settings}, kv=settings_of(kv),
                             speed=speed, keep=out is not None)
    with reported(progress, "evaluating") as listener:
        result = measure([models] if isinstance(models, str) else models, chosen, listener,
                         executor=executor)
    if out is not None:
        write_report(result, Path(out))
    for warning in withheld(result):
        warnings.warn(warning, stacklevel=2)
    return result


def compare(before: str | Path | EvalResult, after: str | Path | EvalResult) -> Comparison:
    """Compare two results, variant by variant, where their protocols allow it.

    Args:
        before: a result, a ``results.json`` file, or the folder that holds one.
        after: the same, of the later run.

    Raises:
        UsageError: a file isn't one, the protocols differ (the field is named), or no variant is in both.

    >>> {change.change for change in quantkit.compare(result, result).variants[1].changes
    ...  if change.metric == "kl_mean"}
    {0.0}
    """
    first, second = (given if isinstance(given, EvalResult) else read_results(Path(given))
                     for given in (before, after))
    return compare_results(first, second)


def chosen_settings(suite: str | None, given: Mapping[str, Any], *, speed: bool, **always: Any
                    ) -> EvalSettings:
    """The settings of a suite, changed by what is given (not ``None``) and by ``always``.

    Args:
        suite: its name or file; ``None``: the defaults.
        given: settings by name. A text or a number of windows replaces those of the suite's texts.
        speed: whether speed is measured.

    Raises:
        UsageError: one is unknown or out of range.
    """
    base = of_suite(load_suite(suite)) if suite else EvalSettings()
    changes = {name: value for name, value in given.items() if value is not None}
    known = [field.name for field in dataclasses.fields(EvalSettings)]
    for name in changes:
        if name not in known:
            raise UsageError(f"there is no setting {name!r}", why=did_you_mean(name, known),
                             next="help(quantkit.evaluate) lists settings")
    if base.tasks and not changes.get("tasks") and changes.get("task_data") is None:
        changes["tasks"] = ()
    texts = () if "text" in changes else tuple(
        part if "windows" not in changes else part.model_copy(update={"windows": None})
        for part in base.texts)
    return dataclasses.replace(base, **{"texts": texts, **changes, **always}, speed=speed,
                               roofline=base.roofline and speed)


def settings_of(kv: str | Sequence[str | KVSpec]) -> tuple[KVSpec, ...]:
    """KV settings, checked; in one text they are separated by commas. Raises UsageError: one can't be read or
    is unknown."""
    if isinstance(kv, str):
        kv = split_settings(kv)
    specs = tuple(parse_kv(setting) if isinstance(setting, str) else setting for setting in kv)
    for spec in specs:
        check_kv(spec)
    return specs
