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
from quantkit.evaluation.peers.row import PeerMeasurement, peer_row
from quantkit.evaluation.protocol import Protocol, cpu_cores, cpu_name
from quantkit.evaluation.result import EvalResult, ModelResult, TokenDiff
from quantkit.evaluation.roofline.result import Roofline
from quantkit.evaluation.settings import EvalSettings
from quantkit.evaluation.speed_sweep import SpeedSweep, Spread
from quantkit.evaluation.sweep.facts import ModelFacts
from quantkit.evaluation.sweep.jobs import Measurement
from quantkit.evaluation.sweep.plan import SweepPlan
from quantkit.evaluation.sweep.store import MeasurementResult
from quantkit.evaluation.task_score import wilson
from quantkit.evaluation.token_scores import TokenScores, joined, tails
from quantkit.support.device import find_device, gpu_name

DIFF_TOKENS = 240
"""Tokens of the text that is shown token by token."""
Done = Mapping[tuple[str, int, int], MeasurementResult]
"""By kind, model and text or KV setting."""


def assemble(plan: SweepPlan, settings: EvalSettings, done: Done) -> EvalResult:
    """The result of a comparison whose measurements are all done."""
    quality = [[done["quality", number, place] for place in range(len(plan.texts))]
               for number in range(len(plan.models))]
    protocol = _protocol(plan, settings, quality, done)
    metrics = {registered.metric.name: registered for registered in registered_metrics()}
    rows = []
    for number, model in enumerate(plan.models):
        for setting in range(len(plan.kv)):
            row = _row(plan, model, quality[number], setting, protocol, metrics)
            _add_tasks(row, done.get(("tasks", number, setting)))
            _add_speed(row, done.get(("speed", number, setting)))
            rows.append(row)
    rows += [_peer(done["peer", number, 0], protocol) for number in range(len(settings.peers))]
    protocol = replace(protocol, runs=_runs(rows))
    result = EvalResult(protocol, rows, suite=settings.suite)
    result.floors = _floors(quality[0]) | _task_floors(done)
    infos = {name: registered.info() for name, registered in metrics.items()}
    for row in rows[1:]:
        row.differences = differences(rows[0], row, builtin_infos() | infos, floors=result.floors)
    for number, model in enumerate(plan.models):
        measurement = done.get(("roofline", number, 0))
        if measurement is not None and (operators := measurement.data["roofline"]) is not None:
            roofline = Roofline.model_validate(operators, strict=False)
            result.roofline.append(roofline.model_copy(update={"model": model.uri}))
    if (measurement := done.get(("sensitivity", 0, 0))) is not None:
        result.sensitivity = [(name, loss) for name, loss in measurement.data["losses"]]
    if diffs := _diffs(plan, result, quality):
        result.diff, *result.other_diffs = diffs
    return result


def _runs(rows: Sequence[ModelResult]) -> tuple[int, int] | None:
    """The fewest and the most timed runs of a request whose speed is shown; 0 if no speed is."""
    if not any(row.speed for row in rows):
        return None
    counts = [case.runs for row in rows if row.speed for case in row.speed.prefill[:1] if case.runs]
    return (min(counts), max(counts)) if counts else (0, 0)


def by_place(results: Mapping[int, MeasurementResult], measurements: Sequence[Measurement]) -> Done:
    """Results by kind, model and text or setting."""
    return {(measurement.kind, *measurement.variant): results[number]
            for number, measurement in enumerate(measurements)}


def _row(plan: SweepPlan, model: ModelFacts, measurements: Sequence[MeasurementResult], setting: int,
         protocol: Protocol, metrics: Mapping[str, RegisteredMetric]) -> ModelResult:
    parts = [measurement.data["rows"][setting] for measurement in measurements]
    first = parts[0]
    row = ModelResult(model.uri, first["label"], first["bits_per_weight"], first["file_bytes"],
                      manifest_sha256=first["manifest_sha256"], kv=first["kv"], recipe=model.recipe,
                      kv_bytes=max(part["kv_bytes"] or 0 for part in parts) or None,
                      kv_bytes_per_token=first["kv_bytes_per_token"], weight_bytes=first["weight_bytes"])
    names = [name for name in first["means"] if all(name in part["means"] for part in parts)]
    if EXACT in names:
        names.remove(EXACT)
        exact = np.concatenate([part["means"][EXACT] for part in parts])
        row.metrics[EXACT] = Metric(EXACT, KL.score).summarize(exact)
    row.metrics |= summarized(metrics, {
        name: np.concatenate([part["means"][name] for part in parts]) for name in names})
    names = [name for name in names if name in row.metrics]
    scores = [_tokens(measurement, setting) for measurement in measurements]
    row.metrics |= tails(joined(scores))
    _add_words(row, protocol)
    for text, part, tokens in zip(plan.texts, parts, scores):
        name = text.name or text.text.name
        row.texts[name] = summarized(metrics, {key: part["means"][key] for key in names}) | tails(tokens)
        row.window_means[name] = {key: part["means"][key] for key in names
                                  if metrics[key].metric.per != "run"}
        row.window_means[name]["flips"] = (1.0 - tokens.agrees.mean(axis=1)).tolist()
    row.measured["quality"] = max(measurement.measured for measurement in measurements)
    return row


def _peer(measurement: MeasurementResult, protocol: Protocol) -> ModelResult:
    row = peer_row(PeerMeasurement(measurement.data, measurement.arrays))
    _add_words(row, protocol)
    row.measured = dict.fromkeys(("quality", "speed") if row.speed else ("quality",), measurement.measured)
    return row


def _tokens(measurement: MeasurementResult, setting: int, prefix: str = "") -> TokenScores:
    return TokenScores(*(measurement.arrays[f"{setting}/{prefix}{name}"]
                         for name in ("kl", "loss", "likeliest", "agrees")))


def _add_words(row: ModelResult, protocol: Protocol) -> None:
    """The perplexity a word; not behind a prompt, whose words aren't counted apart."""
    if protocol.words and not protocol.prompt and (tokens := row.metrics.get(PERPLEXITY.name)) is not None:
        row.metrics[WORD_PERPLEXITY] = per_word(tokens, protocol.scored / protocol.words)


def _add_tasks(row: ModelResult, measurement: MeasurementResult | None) -> None:
    if measurement is None:
        return
    for score in measurement.data["scores"]:
        key = f"{score['task']}/{score['metric']}"
        row.metrics[key] = Interval(*score["interval"])
        row.items[key] = score["values"]
    row.measured["tasks"] = measurement.measured


def _add_speed(row: ModelResult, measurement: MeasurementResult | None) -> None:
    if measurement is None:
        return
    sweep = SpeedSweep.model_validate(measurement.data["sweep"], strict=False)
    row.speed, row.load_s, row.kernels = sweep, sweep.load_s, sweep.kernels
    row.peak_bytes = None if sweep.memory is None else sweep.memory.peak
    for point in sweep.prefill[:1]:  # one request: its prompt, and the answer behind it
        row.metrics["prefill_tok_s"] = _interval(point.tok_s)
        if point.decode_tok_s is not None:
            row.metrics["decode_tok_s"] = _interval(point.decode_tok_s)
    row.measured["speed"] = measurement.measured


def _interval(spread: Spread) -> Interval:
    return Interval(spread.median, spread.low, spread.high)


def per_word(perplexity: Interval, tokens_per_word: float) -> Interval:
    """Perplexity a word from that a token: comparable between tokenizers."""
    logs = (math.log(end) * tokens_per_word for end in (perplexity.value, perplexity.low, perplexity.high))
    return Interval(*(math.exp(log) if log < 700 else math.inf for log in logs))


def _protocol(plan: SweepPlan, settings: EvalSettings, quality: Sequence[Sequence[MeasurementResult]],
              done: Done) -> Protocol:
    first, texts = quality[0], plan.texts
    dtypes = dict.fromkeys(measurement[0].data["rows"][0]["dtype"] for measurement in quality)
    timed = (settings.prefill_tokens, settings.decode, settings.repeats) if settings.speed else (0, 0, 0)
    asked = done.get(("tasks", 0, 0))
    tasks = {} if asked is None else {score["task"]: score["items"] for score in asked.data["scores"]}
    parts = tuple((text.name, text.text.name, text.text.sha256, text.windows) for text in texts)
    return Protocol(
        ", ".join(text.text.name for text in texts), _combined_hash([text.text.sha256 for text in texts]),
        _combined_hash([measurement.data["tokens"] for measurement in first]), settings.window,
        sum(text.windows for text in texts), sum(measurement.data["words"] for measurement in first),
        ", ".join(dtypes), *timed, __version__, torch.__version__, cpu_name(), cpu_cores(),
        torch.get_num_threads(), plan.prompt,
        ", ".join(f"{name} ({count} items)" for name, count in tasks.items()),
        bos="first" if first[0].data["bos"] else "none", gpu=gpu_name(find_device(settings.device)),
        texts=parts if len(parts) > 1 else ())


def _combined_hash(hashes: Sequence[str]) -> str:
    """Of several texts: of their hashes."""
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def _floors(measurements: Sequence[MeasurementResult]) -> dict[str, Interval]:
    """What the reference's own arithmetic makes of each metric, compared with float32."""
    if "0/exact_kl" not in measurements[0].arrays:
        return {}
    far = joined([_tokens(measurement, 0, "exact_") for measurement in measurements])
    floors = {KL.name: KL.summarize(far.kl.astype(np.float64).mean(axis=1))} | tails(far)
    flips = floors["flips"]
    floors["top1"] = Interval(1 - flips.value, 1 - flips.high, 1 - flips.low)
    return floors


def _task_floors(done: Done) -> dict[str, Interval]:
    """The share of each task's items that the reference's own arithmetic answers otherwise than float32."""
    exact, rounded = done.get(("exact_tasks", 0, 0)), done.get(("tasks", 0, 0))
    if exact is None or rounded is None:
        return {}
    floors = {}
    for first, second in zip(exact.data["scores"], rounded.data["scores"], strict=True):
        change = np.abs(np.asarray(first["values"], float) - np.asarray(second["values"], float))
        if len(change) and np.isin(change, (0.0, 1.0)).all():  # right or wrong; others have no share
            floors[f"{first['task']}/{first['metric']}"] = wilson(float(change.sum()), len(change))
    return floors


def _diffs(plan: SweepPlan, result: EvalResult,
           quality: Sequence[Sequence[MeasurementResult]]) -> list[TokenDiff]:
    """The first text's beginning as the reference and each variant with a finite KL see it, the closest
    variant first."""
    variants = len(plan.models) * len(plan.kv)
    distances = [(value.value, number) for number, row in enumerate(result.rows[:variants])
                 if number and (value := row.metrics.get(KL.name)) is not None and math.isfinite(value.value)]
    return [_diff(plan, quality, number) for _, number in sorted(distances)]


def _diff(plan: SweepPlan, quality: Sequence[Sequence[MeasurementResult]], variant: int) -> TokenDiff:
    tokenizer = plan.models[0].tokenizer
    number, setting = divmod(variant, len(plan.kv))
    ours, theirs = _tokens(quality[0][0], 0), _tokens(quality[number][0], setting)
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
