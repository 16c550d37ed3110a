"""Runs one comparison: loads, scores and times every model. The first model is the reference."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quantkit import __version__
from quantkit.device import gpu_name
from quantkit.errors import UsageError, did_you_mean
from quantkit.evaluate.forced import TeacherForcedModel
from quantkit.evaluate.keys import EXACT, PER_RUN, WORD_PERPLEXITY
from quantkit.evaluate.metric_table import MetricInfo, RegisteredMetric, builtin_infos, registered_metrics
from quantkit.evaluate.metrics import Interval
from quantkit.evaluate.protocol import Protocol, cpu_cores, cpu_name
from quantkit.evaluate.quality import compare, windows_of
from quantkit.evaluate.result import EvalResult, ModelResult
from quantkit.evaluate.speed import measure_sweep
from quantkit.evaluate.speed_sweep import Spread, SweepSettings
from quantkit.evaluate.text import BUILTIN, EvalText, load_text
from quantkit.plugins import current
from quantkit.progress import Listener, ProgressEvent, silent
from quantkit.runtime.loader import LoadedModel, load
from quantkit.spec import KVSpec

if TYPE_CHECKING:
    from quantkit.evaluate.tasks import ReadyTask


@dataclass(frozen=True)
class EvalSettings:
    """What the caller chooses; see :class:`~quantkit.evaluate.protocol.Protocol` for the meaning.

    Attributes:
        prefill: ``None``: 256 tokens, or with KV settings as many as leave the window full at the end.
        kv: every model runs with each of these; empty: with its own.
        prompt: ``None``: half the window, if any KV setting is other than ``none``.
        tasks: names of tasks, or of their files.
        task_data: the folder with the tasks' data.
        limit: items a task; ``None``: all.
        plot: keys of the metrics that a plot shows; empty: the usual ones.
    """

    text: str = BUILTIN
    window: int = 512
    windows: int = 40
    dtype: str = "auto"
    prefill: int | None = None
    decode: int = 32
    repeats: int = 3
    speed: bool = True
    noise_floor: bool = False
    revision: str | None = None
    device: str = "auto"
    kv: tuple[KVSpec, ...] = ()
    prompt: int | None = None
    tasks: tuple[str, ...] = ()
    task_data: Path | None = None
    limit: int | None = None
    plot: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("window", 2), ("windows", 1), ("prefill", 1), ("decode", 1), ("repeats", 1),
                            ("prompt", 1), ("limit", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{name} is {value}", why=f"it must be at least {least}")
        if self.prompt is not None and self.prompt > self.window - 2:
            raise UsageError(f"a prompt of {self.prompt} tokens leaves nothing to predict",
                             why=f"a window has {self.window}", next="give a smaller --prompt")
        if len({str(spec) for spec in self.kv}) != len(self.kv):
            raise UsageError("a KV setting is given twice", next="name each setting once")

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens of the speed test."""
        if self.prefill is not None:
            return self.prefill
        return max(1, self.window - self.decode - 1) if self.kv else 256

    def revision_of(self, index: int) -> str | None:
        """``revision`` is the first model's."""
        return self.revision if index == 0 else None


def evaluate(uris: Sequence[str], settings: EvalSettings, progress: Listener = silent,
             command: str | None = None, loading: Listener = silent) -> EvalResult:
    """Compare models, or the product of models and KV settings.

    Args:
        uris: checkpoints or sources, the reference first.
        settings: protocol.
        progress: told of every window, every timed model and every task.
        command: what was typed, for the report.
        loading: told of the weights of each model that is loaded, in MiB.

    Raises:
        UsageError: a metric to plot isn't measured.
        QuantkitError: a model can't be loaded, the text is unusable, or a measurement failed.
    """
    if not uris:
        raise UsageError("no model is given", next="quantkit eval smollm2")
    if len(set(uris)) != len(uris):
        raise UsageError("a model is given twice", next="name each model once")
    tasks = _ready(settings)
    metrics = registered_metrics()
    infos = _infos(settings, metrics)
    # models are loaded and dropped inside: while speed is measured, memory belongs to one worker
    result, tokens = _quality(uris, settings, load_text(settings.text), tasks, metrics, progress,
                              loading)
    result.metrics, result.command = infos, command
    result.plotted = settings.plot or result.plotted
    if torch.cuda.is_initialized():  # what torch keeps of theirs isn't the worker's
        torch.cuda.empty_cache()
    if settings.speed:
        _speed(uris, result, tokens.reshape(-1).tolist(), settings, progress)
    current().notify("on_run_finished", kind="eval", summary=result.to_dict())
    return result


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


def _quality(uris: Sequence[str], settings: EvalSettings, text: EvalText, tasks: Sequence[ReadyTask],
             metrics: Sequence[RegisteredMetric], progress: Listener,
             loading: Listener) -> tuple[EvalResult, torch.Tensor]:
    models = [load(uri, revision=settings.revision_of(i), dtype=settings.dtype, device=settings.device,
                   loading=loading)
              for i, uri in enumerate(uris)]
    tokens = _tokens(models, settings, text)
    extra = load(uris[0], revision=settings.revision, dtype="float32",
                 device=settings.device, loading=loading) if settings.noise_floor else None
    variants = [(model, kv) for model in models for kv in settings.kv or (model.kv,)]
    prompt = _prompt(variants, settings)
    runners: list[LoadedModel | TeacherForcedModel]
    exact: LoadedModel | TeacherForcedModel | None
    if prompt is None:
        runners, exact = list(models), extra
    else:
        runners = [TeacherForcedModel(model, kv, prompt) for model, kv in variants]
        exact = extra and TeacherForcedModel(extra, variants[0][1], prompt)
    scores = compare(runners, tokens, progress, prompt or 0, exact, metrics)
    protocol = _protocol(models, settings, text, tokens, prompt)
    rows = [_row(runner, score, protocol) for runner, score in zip(runners, scores)]
    if tasks:
        protocol = dataclasses.replace(protocol, tasks=_tasks(variants, rows, tasks, progress))
    return EvalResult(protocol, rows), tokens


def _prompt(variants: Sequence[tuple[LoadedModel, KVSpec]], settings: EvalSettings) -> int | None:
    """``None`` if no cache is needed: nobody asks for a KV setting, no checkpoint has one of its own."""
    if not settings.kv and settings.prompt is None and all(kv == KVSpec() for _, kv in variants):
        return None
    if settings.window < 4:
        raise UsageError(f"--window {settings.window} is too short for a prompt and an answer",
                         next="--window 512")
    return settings.prompt or settings.window // 2


def _ready(settings: EvalSettings) -> list[ReadyTask]:
    """The tasks with their data, before any model is loaded: what is missing shows at once."""
    if not settings.tasks:
        return []
    from quantkit.evaluate.tasks import prepare_tasks

    return prepare_tasks(settings.tasks, data=settings.task_data, limit=settings.limit)


def _tasks(variants: Sequence[tuple[LoadedModel, KVSpec]], rows: Sequence[ModelResult],
           tasks: Sequence[ReadyTask], progress: Listener) -> str:
    """Scores into the rows' metrics, as ``task/metric``; what was run, for the protocol."""
    from quantkit.evaluate.tasks import run_tasks

    message = ""
    for (model, kv), row in zip(variants, rows):
        scores = run_tasks(model, tasks, kv=kv, progress=progress)
        row.metrics |= {f"{score.task}/{score.metric}": score.interval for score in scores}
        items = {score.task: score.items for score in scores}
        message = ", ".join(f"{name} ({count} items)" for name, count in items.items())
    return message


def _tokens(models: Sequence[LoadedModel], settings: EvalSettings, text: EvalText) -> torch.Tensor:
    """int64 ``[windows, window]``, the same for all models."""
    for model in models:
        limit = model.config.max_position_embeddings
        if settings.speed and settings.prefill_tokens + settings.decode >= limit:
            raise UsageError(f"the speed test is longer than {model.uri} takes",
                             why=f"{settings.prefill_tokens} tokens in and {settings.decode} out; "
                                 f"it was made for {limit}", next="give a smaller --prefill, or --no-speed")
    tokens = windows_of(models[0], text.content, settings.window, settings.windows)
    for model in models[1:]:
        if not torch.equal(tokens, windows_of(model, text.content, settings.window, settings.windows)):
            raise UsageError(f"{model.uri} splits the text into other tokens than {models[0].uri}",
                             why="a comparison token by token needs the same tokenizer",
                             next="compare models of one family")
    return tokens


def _protocol(models: Sequence[LoadedModel], settings: EvalSettings, text: EvalText,
              tokens: torch.Tensor, prompt: int | None) -> Protocol:
    dtypes = dict.fromkeys(str(model.dtype).removeprefix("torch.") for model in models)
    words = sum(len(models[0].tokenizer.decode(window, skip_special=False).split())
                for window in tokens.tolist())
    timed = (settings.prefill_tokens, settings.decode, settings.repeats) if settings.speed else (0, 0, 0)
    return Protocol(
        text.name, text.sha256, hashlib.sha256(tokens.numpy().astype("<i8").tobytes()).hexdigest(),
        settings.window, settings.windows, words, ", ".join(dtypes), *timed, __version__, torch.__version__,
        cpu_name(), cpu_cores(), torch.get_num_threads(), prompt, gpu=gpu_name(models[0].model.device))


def _row(runner: LoadedModel | TeacherForcedModel, metrics: dict[str, Interval],
         protocol: Protocol) -> ModelResult:
    model = runner.loaded if isinstance(runner, TeacherForcedModel) else runner
    digest = None if model.manifest is None else hashlib.sha256(model.manifest.to_bytes()).hexdigest()
    if protocol.words and not protocol.prompt and (tokens := metrics.get("perplexity")):
        metrics[WORD_PERPLEXITY] = per_word(tokens, protocol.scored / protocol.words)
    row = ModelResult(model.uri, model.label, model.bits_per_weight, model.file_bytes, metrics=metrics,
                      manifest_sha256=digest)
    if isinstance(runner, TeacherForcedModel):
        row.kv = str(runner.kv)
        row.kv_bytes, row.kv_bytes_per_token = runner.kv_bytes, runner.kv_bytes_per_token
    return row


def per_word(perplexity: Interval, tokens_per_word: float) -> Interval:
    """Perplexity a word from that a token: comparable between tokenizers."""
    logs = (math.log(end) * tokens_per_word for end in (perplexity.value, perplexity.low, perplexity.high))
    return Interval(*(math.exp(log) if log < 700 else math.inf for log in logs))


def _speed(uris: Sequence[str], result: EvalResult, ids: list[int], settings: EvalSettings,
           progress: Listener) -> None:
    rows = result.rows
    swept = SweepSettings(prefill=settings.prefill_tokens, decode=settings.decode, repeats=settings.repeats)
    for i, row in enumerate(rows):
        name = row.method + (f" kv {row.kv}" if row.kv else "")
        progress(ProgressEvent(i, len(rows), f"speed of {name}"))
        row.speed = measure_sweep(row.model, ids, swept, threads=result.protocol.threads,
                                  revision=settings.revision_of(uris.index(row.model)), dtype=settings.dtype,
                                  device=settings.device, kv=row.kv)
        prefill, memory = row.speed.prefill[0], row.speed.memory
        row.peak_bytes = None if memory is None else memory.peak
        row.load_s, row.kernels = row.speed.load_s, row.speed.kernels
        row.metrics |= {key: _interval(spread) for key, spread in (
            ("prefill_tok_s", prefill.tok_s), ("decode_tok_s", prefill.decode_tok_s)) if spread is not None}
    progress(ProgressEvent(len(rows), len(rows), "timed"))


def _interval(spread: Spread) -> Interval:
    return Interval(spread.median, spread.low, spread.high)
