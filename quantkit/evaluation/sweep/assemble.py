"""What the measurements of a comparison come to: rows with intervals, the protocol, and noise floors."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from quantkit import __version__
from quantkit.evaluation.keys import EXACT, WORD_PERPLEXITY
from quantkit.evaluation.metric_table import RegisteredMetric, builtin_infos, registered_metrics, summarized
from quantkit.evaluation.metrics import KL, PERPLEXITY, Interval, Metric
from quantkit.evaluation.paired import differences
from quantkit.evaluation.peers.row import PeerData, peer_row
from quantkit.evaluation.protocol import Protocol, cpu_cores, cpu_name
from quantkit.evaluation.quality.token_scores import TokenScores, joined, tails
from quantkit.evaluation.result import EvalResult, ModelResult, TokenDiff
from quantkit.evaluation.settings import EvalSettings
from quantkit.evaluation.sweep.jobs import Place, RooflineData, SensitivityData, SpeedData, TasksData
from quantkit.evaluation.sweep.models import ModelFacts
from quantkit.evaluation.sweep.plan import SweepPlan
from quantkit.evaluation.sweep.quality import QualityData
from quantkit.evaluation.sweep.run import SweepResults
from quantkit.evaluation.sweep.store import MeasurementResult
from quantkit.evaluation.tasks.score import wilson
from quantkit.support.device import find_device, gpu_name

DIFF_TOKENS = 240
"""Tokens of the text that is shown token by token."""
Quality = MeasurementResult[QualityData]


def assemble(plan: SweepPlan, settings: EvalSettings, done: SweepResults) -> EvalResult:
    """The result of a comparison whose measurements are all done."""
    by_text = done.of("quality", QualityData)
    tasks = done.of("tasks", TasksData)
    speed = done.of("speed", SpeedData)
    quality = [[by_text[Place(number, place)] for place in range(len(plan.texts))]
               for number in range(len(plan.models))]
    protocol = _protocol(plan, settings, quality, tasks.get(Place(0)))
    metrics = {registered.metric.name: registered for registered in registered_metrics()}
    rows = []
    for number, model in enumerate(plan.models):
        for setting in range(len(plan.kv)):
            row = _row(plan, model, quality[number], setting, protocol, metrics)
            _add_tasks(row, tasks.get(Place(number, setting)))
            _add_speed(row, speed.get(Place(number, setting)))
            rows.append(row)
    for peer in done.of("peer", PeerData).values():
        row = peer_row(peer)
        _add_words(row, protocol)
        rows.append(row)
    protocol = replace(protocol, runs=_runs(rows))
    result = EvalResult(protocol, rows, suite=settings.suite)
    result.floors = _floors(quality[0]) | _task_floors(done.of("exact_tasks", TasksData).get(Place(0)),
                                                       tasks.get(Place(0)))
    infos = {name: registered.info() for name, registered in metrics.items()}
    for row in rows[1:]:
        row.differences = differences(rows[0], row, builtin_infos() | infos, floors=result.floors)
    result.roofline = [measurement.data.roofline.model_copy(update={"model": plan.models[place.model].uri})
                       for place, measurement in done.of("roofline", RooflineData).items()
                       if measurement.data.roofline is not None]
    for sensitivity in done.of("sensitivity", SensitivityData).values():
        result.sensitivity = list(sensitivity.data.losses)
    if diffs := _diffs(plan, result, quality):
        result.diff, *result.other_diffs = diffs
    return result


def _runs(rows: Sequence[ModelResult]) -> tuple[int, int] | None:
    """The fewest and the most timed runs of a request whose speed is shown; 0 if no speed is."""
    if not any(row.speed for row in rows):
        return None
    counts = [case.runs for row in rows if row.speed for case in row.speed.prefill[:1] if case.runs]
    return (min(counts), max(counts)) if counts else (0, 0)


def _row(plan: SweepPlan, model: ModelFacts, measurements: Sequence[Quality], setting: int,
         protocol: Protocol, metrics: Mapping[str, RegisteredMetric]) -> ModelResult:
    parts = [measurement.data.rows[setting] for measurement in measurements]
    first = parts[0]
    row = ModelResult(model.uri, first.label, first.bits_per_weight, first.file_bytes,
                      manifest_sha256=first.manifest_sha256, kv=first.kv, recipe=model.recipe,
                      kv_bytes=max(part.kv_bytes or 0 for part in parts) or None,
                      kv_bytes_per_token=first.kv_bytes_per_token, weight_bytes=first.weight_bytes or None)
    names = [name for name in first.means if all(name in part.means for part in parts)]
    if EXACT in names:
        names.remove(EXACT)
        exact = np.concatenate([part.means[EXACT] for part in parts])
        row.metrics[EXACT] = Metric(EXACT, KL.score).summarize(exact)
    row.metrics |= summarized(metrics, {
        name: np.concatenate([part.means[name] for part in parts]) for name in names})
    names = [name for name in names if name in row.metrics]
    scores = [TokenScores.of_arrays(measurement.arrays, f"{setting}/") for measurement in measurements]
    row.metrics |= tails(joined(scores))
    _add_words(row, protocol)
    for text, part, tokens in zip(plan.texts, parts, scores):
        name = text.name or text.text.name
        row.texts[name] = summarized(metrics, {key: part.means[key] for key in names}) | tails(tokens)
        row.window_means[name] = {key: part.means[key] for key in names if metrics[key].metric.per != "run"}
        row.window_means[name]["flips"] = (1.0 - tokens.agrees.mean(axis=1)).tolist()
    row.measured["quality"] = max(measurement.measured for measurement in measurements)
    return row


def _add_words(row: ModelResult, protocol: Protocol) -> None:
    """The perplexity a word; not behind a prompt, whose words aren't counted apart."""
    if protocol.words and not protocol.prompt and (tokens := row.metrics.get(PERPLEXITY.name)) is not None:
        row.metrics[WORD_PERPLEXITY] = per_word(tokens, protocol.scored / protocol.words)


def _add_tasks(row: ModelResult, measurement: MeasurementResult[TasksData] | None) -> None:
    if measurement is None:
        return
    for score in measurement.data.scores:
        key = f"{score.task}/{score.metric}"
        row.metrics[key] = Interval(*score.interval)
        row.items[key] = list(score.values)
    row.measured["tasks"] = measurement.measured


def _add_speed(row: ModelResult, measurement: MeasurementResult[SpeedData] | None) -> None:
    if measurement is None:
        return
    sweep = measurement.data.sweep
    row.speed = sweep
    row.load_s = sweep.load_s
    row.kernels = sweep.kernels
    row.peak_bytes = None if sweep.memory is None else sweep.memory.peak
    for point in sweep.prefill[:1]:  # one request: its prompt, and the answer behind it
        row.metrics["prefill_tok_s"] = point.tok_s.interval
        if point.decode_tok_s is not None:
            row.metrics["decode_tok_s"] = point.decode_tok_s.interval
    row.measured["speed"] = measurement.measured


def per_word(perplexity: Interval, tokens_per_word: float) -> Interval:
    """Perplexity a word from that a token: comparable between tokenizers."""
    logs = (math.log(end) * tokens_per_word for end in (perplexity.value, perplexity.low, perplexity.high))
    return Interval(*(math.exp(log) if log < 700 else math.inf for log in logs))


def _protocol(plan: SweepPlan, settings: EvalSettings, quality: Sequence[Sequence[Quality]],
              asked: MeasurementResult[TasksData] | None) -> Protocol:
    first, texts = [measurement.data for measurement in quality[0]], plan.texts
    dtypes = dict.fromkeys(measurements[0].data.rows[0].dtype for measurements in quality)
    timed = (settings.prefill_tokens, settings.decode, settings.repeats) if settings.speed else (0, 0, 0)
    tasks = {} if asked is None else {score.task: score.items for score in asked.data.scores}
    parts = tuple((text.name, text.text.name, text.text.sha256, text.windows) for text in texts)
    return Protocol(
        ", ".join(text.text.name for text in texts), _combined_hash([text.text.sha256 for text in texts]),
        _combined_hash([data.tokens for data in first]), settings.window,
        sum(text.windows for text in texts), sum(data.words for data in first),
        ", ".join(dtypes), *timed, __version__, torch.__version__, cpu_name(), cpu_cores(),
        torch.get_num_threads(), plan.prompt,
        ", ".join(f"{name} ({count} items)" for name, count in tasks.items()),
        bos="first" if first[0].bos else "none", gpu=gpu_name(find_device(settings.device)),
        texts=parts if len(parts) > 1 else (),
        block=None if (diffusion := plan.models[0].config.diffusion) is None else diffusion.block_size)


def _combined_hash(hashes: Sequence[str]) -> str:
    """Of several texts: of their hashes."""
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def _floors(measurements: Sequence[Quality]) -> dict[str, Interval]:
    """What the reference's own arithmetic makes of each metric, compared with float32."""
    if "0/exact_kl" not in measurements[0].arrays:
        return {}
    far = joined([TokenScores.of_arrays(measurement.arrays, "0/exact_") for measurement in measurements])
    floors = {KL.name: KL.summarize(far.kl.astype(np.float64).mean(axis=1))} | tails(far)
    flips = floors["flips"]
    floors["top1"] = Interval(1 - flips.value, 1 - flips.high, 1 - flips.low)
    return floors


def _task_floors(exact: MeasurementResult[TasksData] | None,
                 rounded: MeasurementResult[TasksData] | None) -> dict[str, Interval]:
    """The share of each task's items that the reference's own arithmetic answers otherwise than float32."""
    if exact is None or rounded is None:
        return {}
    floors = {}
    for first, second in zip(exact.data.scores, rounded.data.scores, strict=True):
        change = np.abs(np.asarray(first.values, float) - np.asarray(second.values, float))
        if len(change) and np.isin(change, (0.0, 1.0)).all():  # right or wrong; others have no share
            floors[f"{first.task}/{first.metric}"] = wilson(float(change.sum()), len(change))
    return floors


def _diffs(plan: SweepPlan, result: EvalResult, quality: Sequence[Sequence[Quality]]) -> list[TokenDiff]:
    """The first text's beginning as the reference and each variant with a finite KL see it, the closest
    variant first."""
    variants = len(plan.models) * len(plan.kv)
    distances = [(value.value, number) for number, row in enumerate(result.rows[:variants])
                 if number and (value := row.metrics.get(KL.name)) is not None and math.isfinite(value.value)]
    return [_diff(plan, quality, number) for _, number in sorted(distances)]


def _diff(plan: SweepPlan, quality: Sequence[Sequence[Quality]], variant: int) -> TokenDiff:
    tokenizer = plan.models[0].tokenizer
    number, setting = divmod(variant, len(plan.kv))
    ours = TokenScores.of_arrays(quality[0][0].arrays, "0/")
    theirs = TokenScores.of_arrays(quality[number][0].arrays, f"{setting}/")
    count = min(DIFF_TOKENS, ours.kl.shape[1])
    ids = quality[0][0].arrays["ids"][0][-ours.kl.shape[1]:][:count]

    def text(token: Any) -> str:
        return tokenizer.decode([int(token)], skip_special=False)

    names = [model.name + (f" kv {setting}" if setting else "") for model in plan.models
             for setting in plan.kv]
    pairs = zip(theirs.agrees[0], ours.likeliest[0], theirs.likeliest[0])
    expected = tuple(None if agrees else (text(before), text(after))
                     for agrees, before, after in list(pairs)[:count])
    return TokenDiff(text=plan.texts[0].name or plan.texts[0].text.name, reference=names[0],
                     candidate=names[variant], tokens=tuple(map(text, ids)),
                     kl=tuple(float(value) for value in theirs.kl[0, :count]),
                     loss=tuple(float(value) for value in (theirs.loss - ours.loss)[0, :count]),
                     expected=expected)
